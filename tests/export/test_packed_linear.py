from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from w4a4.configs.errors import CheckpointError, NumericsError
from w4a4.export.packed_linear import PackedLinear
from w4a4.export.quantization_config import LayoutRules
from w4a4.kernels.layout import LinearLayout, Segment

LAYOUTS = {
    "4 | 8": LinearLayout(5, (Segment(448, 4, 4), Segment(128, 8, 8))),
    "published 4 | 8 with int4 throughout": LinearLayout(5, (Segment(384, 4, 4), Segment(128, 8, 4)), clip=(0.9, 2.5)),
    "QUIK": LinearLayout(3, (Segment(56, 4, 4), Segment(10, 16, 16)), symmetric=False),
    "8 bit": LinearLayout(7, (Segment(33, 8, 8),)),
    "weight only, grouped": LinearLayout(4, (Segment(576, 16, 4),), group_size=64),
    "weight only, per row": LinearLayout(4, (Segment(64, 16, 4),)),
    "all seven cuts": LinearLayout(2, (Segment(8, 4, 4), Segment(8, 8, 4), Segment(8, 8, 8), Segment(24, 16, 16))),
    "down with Hadamard": LinearLayout(6, (Segment(256, 4, 4),), clip=(1.0, float("inf")), hadamard=128),
    "16 bit": LinearLayout(6, (Segment(12, 16, 16),)),
}


def rules_of(layout: LinearLayout) -> LayoutRules:
    return LayoutRules(layout.symmetric, layout.hadamard, layout.group_size > 0)


def read_back(linear: PackedLinear, prefix: str = "mlp.down_proj") -> PackedLinear:
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in linear.to_tensors(prefix).items()}
    return PackedLinear.from_tensors(prefix, tensors, rules_of(linear.layout), "file")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("is_full", [True, False])
def test_comes_back_as_it_was(tiny: ModuleType, layout: LinearLayout, is_full: bool) -> None:
    linear = tiny.random_linear(layout, 1, has_perm=is_full, has_bias=is_full)
    back = read_back(linear)
    assert replace(back.layout, clip=layout.clip) == layout
    assert torch.tensor(back.layout.clip).equal(torch.tensor(layout.clip))  # float32 in the file
    for ours, theirs in zip(back.weights, linear.weights, strict=True):
        assert ours.dtype == theirs.dtype and ours.equal(theirs)
    assert back.weight_scales.equal(linear.weight_scales)
    if is_full:
        assert back.perm is not None and back.perm.equal(linear.perm)
        assert back.bias is not None and back.bias.equal(linear.bias)
    else:
        assert back.perm is None and back.bias is None


def test_bytes_of_a_known_linear() -> None:
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4], [7, 7, 7, 7, 7, 7, 7, 7]], dtype=torch.int8)
    linear = PackedLinear(LinearLayout(2, (Segment(8, 4, 4),)), (codes,), torch.tensor([[0.5], [2.0]]), None, None)
    tensors = linear.to_tensors("p")
    assert tensors["p.weight_packed"].tolist() == [[0xCBA9F810 - 2**32], [-1]]
    assert tensors["p.block_precision"].tolist() == [4]
    assert tensors["p.weight_shape"].tolist() == [2, 8]
    assert tensors["p.act_clip"].tolist() == [1.0, float("inf")]
    assert sorted(tensors) == [f"p.{s}" for s in ("act_clip", "block_precision", "weight_packed", "weight_scale",
                                                  "weight_shape")]  # fmt: skip


def test_block_is_the_largest_that_fits(tiny: ModuleType) -> None:
    for widths, blocks in (((448, 128), 9), ((512, 128), 5), ((48, 16), 4), ((56, 8), 8)):
        layout = LinearLayout(2, (Segment(widths[0], 4, 4), Segment(widths[1], 8, 8)))
        stored = tiny.random_linear(layout, 0).to_tensors("p")["p.block_precision"].tolist()
        assert len(stored) == blocks and stored.count(4) * sum(widths) == widths[0] * blocks


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(8, 8, 8), Segment(8, 4, 4)),  # activation bits fall
        (Segment(8, 8, 8), Segment(8, 16, 4)),  # weight bits fall
        (Segment(8, 4, 4), Segment(8, 4, 4)),  # two of a kind
        (Segment(12, 4, 4), Segment(8, 8, 8)),  # int4 part not a multiple of 8
    ],
)
def test_layouts_the_format_cannot_hold(tiny: ModuleType, segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match="p: "):
        tiny.random_linear(LinearLayout(4, segments), 0).to_tensors("p")


def test_groups_need_weight_only(tiny: ModuleType) -> None:
    layout = LinearLayout(4, (Segment(64, 8, 8),), group_size=32)
    with pytest.raises(ValueError, match="group scales need"):
        tiny.random_linear(layout, 0).to_tensors("p")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scales_are_not_written(tiny: ModuleType, bad: float) -> None:
    linear = tiny.random_linear(LAYOUTS["4 | 8"], 0)
    linear.weight_scales[2, 1] = bad
    with pytest.raises(NumericsError, match="p.weight_scale: got 1 others"):
        linear.to_tensors("p")


def test_scales_that_are_too_few_are_refused(tiny: ModuleType) -> None:
    linear = tiny.random_linear(LAYOUTS["4 | 8"], 0)
    tensors = {name.removeprefix("p."): tensor for name, tensor in linear.to_tensors("p").items()}
    tensors["weight_scale"] = tensors["weight_scale"][:, :1]
    with pytest.raises(CheckpointError, match="1 columns, expected 2 columns, one per integer segment"):
        PackedLinear.from_tensors("p", tensors, LayoutRules(), "file")
