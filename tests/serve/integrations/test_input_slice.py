"""Ranks that each take their slice of a linear's input compute together what the whole linear computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from w4a4.kernels import ops
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.packing import pack_int4
from w4a4.serve.integrations.input_slice import InputSlice, cut_problem, segment_weights

ROWS = 24
MIXED = (Segment(64, 4, 4), Segment(32, 8, 4), Segment(64, 8, 8), Segment(32, 16, 16))
LAYOUTS = {
    "one segment": LinearLayout(ROWS, (Segment(192, 4, 4),)),
    "four segments": LinearLayout(ROWS, MIXED),
    "hadamard": LinearLayout(ROWS, (Segment(128, 4, 4), Segment(64, 8, 8)), hadamard=32),
    "groups": LinearLayout(ROWS, (Segment(192, 16, 4),), group_size=32),
}


def stored_tensors(layout: LinearLayout) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    kinds: dict[int, list[Tensor]] = {4: [], 8: [], 16: []}
    for segment in layout.segments:
        shape, limit = (ROWS, segment.width), 2 ** (segment.weight_bits - 1)
        if segment.weight_bits == 16:
            kinds[16].append(torch.randn(shape, generator=generator).bfloat16())
        else:
            codes = torch.randint(-limit + 1, limit, shape, generator=generator).to(torch.int8)
            kinds[segment.weight_bits].append(codes)
    tensors = {"weight_scale": torch.rand(ROWS, layout.num_scales, generator=generator) + 0.1}
    if kinds[4]:
        tensors["weight_packed"] = pack_int4(torch.cat(kinds[4], 1))
    for bits, suffix in ((8, "weight_int8"), (16, "weight_outlier")):
        if kinds[bits]:
            tensors[suffix] = torch.cat(kinds[bits], 1)
    return tensors


def product(x: Tensor, layout: LinearLayout, stored: dict[str, Tensor], perm: Tensor | None) -> Tensor:
    linear = ops.prepare_linear(layout.at("a16"), segment_weights(layout, stored), stored["weight_scale"], perm)
    return ops.linear_forward(ops.quantize_activation(x.contiguous(), linear), linear)


def whole_blocks(width: int, block: int, seed: int) -> Tensor:
    """A permutation that moves runs of `block` channels as they are."""
    blocks = torch.randperm(width // block, generator=torch.Generator().manual_seed(seed))
    return (blocks[:, None] * block + torch.arange(block)).flatten().int()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_permuted", [False, True])
def test_ranks_add_up_to_the_whole(name: str, num_ranks: int, is_permuted: bool) -> None:
    layout = LAYOUTS[name]
    perm = whole_blocks(192, 32, 1) if is_permuted and name != "groups" else None
    stored = stored_tensors(layout)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(5, ROWS)
    for rank, part in enumerate(x.chunk(num_ranks, 1)):
        share = InputSlice.of(layout, perm, rank, num_ranks)
        assert share.layout.in_features == 192 // num_ranks
        kinds = {(segment.act_bits, segment.weight_bits) for segment in share.layout.segments}
        assert kinds <= {(segment.act_bits, segment.weight_bits) for segment in layout.segments}
        cut = {suffix: share.cut(suffix, tensor) for suffix, tensor in stored.items()}
        total += product(part, share.layout, cut, share.perm)
    assert float((total - product(x, layout, stored, perm)).abs().max()) < 1e-3


def test_channels_in_any_order_are_cut_by_who_owns_them() -> None:
    """Columns of both slices interleave in the stored order; codes of the slice keep theirs."""
    layout = LinearLayout(ROWS, (Segment(64, 4, 4), Segment(64, 8, 8)))
    perm = torch.cat([torch.arange(0, 128, 2), torch.arange(1, 128, 2)]).int()
    share = InputSlice.of(layout, perm, 1, 2)
    assert share.perm is not None and share.perm.tolist() == [*range(0, 64, 2), *range(1, 64, 2)]
    assert [segment.width for segment in share.layout.segments] == [32, 32]
    stored = stored_tensors(layout)
    assert torch.equal(share.cut("weight_int8", stored["weight_int8"]), stored["weight_int8"][:, 32:])


def test_no_default_device_gets_in_the_way() -> None:
    """vLLM builds a model under the device it will run on; what is cut was read on the CPU."""
    layout = LAYOUTS["four segments"]
    with torch.device("meta"):
        share = InputSlice.of(layout, None, 1, 2)
    for suffix, tensor in stored_tensors(layout).items():
        assert torch.equal(share.cut(suffix, tensor), InputSlice.of(layout, None, 1, 2).cut(suffix, tensor))


@pytest.mark.parametrize(
    ("layout", "perm", "num_ranks", "reason"),
    [
        (LAYOUTS["one segment"], None, 5, "192 channels do not divide by 5"),
        (LAYOUTS["hadamard"], None, 4, "a Hadamard of 32 channels would be cut (a slice has 48)"),
        (LAYOUTS["groups"], None, 4, "a group of one scale of 32 channels would be cut (a slice has 48)"),
        (LAYOUTS["hadamard"], torch.arange(192).roll(8).int(), 2, "a Hadamard of 32 channels would be cut"),
        (LAYOUTS["one segment"], None, 16, "rank 0 would get 12 int4 columns, not a multiple of 8"),
    ],
)
def test_what_cannot_be_cut_says_why(layout: LinearLayout, perm: Tensor | None, num_ranks: int, reason: str) -> None:
    problem = cut_problem(layout, perm, num_ranks)
    assert problem is not None and reason in problem
    with pytest.raises(ValueError, match="would|do not divide"):
        InputSlice.of(layout, perm, 0, num_ranks)
