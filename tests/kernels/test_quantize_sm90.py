"""`kernels.quantize_sm90` against the reference (GPU), and what needs no GPU: choices, refusals, compiling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from w4a4.kernels import quantize_sm90
from w4a4.kernels.compile_cache import compile_to
from w4a4.kernels.gemm_sm90 import lanes
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.quantize_sm90_variant import QuantizeVariant, Source, for_few_rows, unsupported, variant_of
from w4a4.kernels.reference import block_hadamard, quantize_activation, rms_norm

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    source: Source
    layout: LinearLayout
    permuted: bool = False
    weighted: bool = False

    @property
    def variant(self) -> QuantizeVariant:
        return variant_of(self.source, self.layout, self.permuted, self.weighted)


def layout_of(*segments: tuple[int, int, int], hadamard: int = 1, rms: float = float("inf")) -> LinearLayout:
    return LinearLayout(128, tuple(Segment(*segment) for segment in segments), (0.95, rms), hadamard=hadamard)


DUAL_576 = layout_of((448, 4, 4), (128, 8, 8), rms=3.0)
DUAL_8192 = layout_of((7168, 4, 4), (1024, 8, 8), rms=3.0)
CASES = {
    "plain a4": Case("plain", layout_of((4096, 4, 4))),
    "plain a8": Case("plain", layout_of((896, 8, 8))),
    "plain a8 a8": Case("plain", layout_of((448, 8, 4), (128, 8, 8))),
    "plain dual": Case("plain", DUAL_576),
    "plain dual permuted": Case("plain", DUAL_576, permuted=True),
    "plain hadamard 64": Case("plain", replace(DUAL_576, hadamard=64)),
    "plain hadamard 128": Case("plain", layout_of((1408, 4, 4), (128, 8, 8), hadamard=128, rms=3.0)),
    "plain wide": Case("plain", layout_of((25088, 4, 4), (3584, 8, 8))),
    "rmsnorm": Case("rmsnorm", DUAL_576),
    "rmsnorm gain": Case("rmsnorm", DUAL_576, weighted=True),
    "rmsnorm permuted": Case("rmsnorm", DUAL_576, permuted=True, weighted=True),
    "residual": Case("rmsnorm_residual", DUAL_8192),
    "residual permuted": Case("rmsnorm_residual", DUAL_8192, permuted=True, weighted=True),
    "swiglu": Case("silu", layout_of((1408, 4, 4), (128, 8, 8))),
    "swiglu hadamard": Case("silu", layout_of((4352, 4, 4), (512, 8, 8), hadamard=128, rms=3.0)),
    "swiglu permuted": Case("silu", layout_of((1408, 4, 4), (128, 8, 8), hadamard=128), permuted=True),
    "swiglu wide": Case("silu", layout_of((25088, 4, 4), (3584, 8, 8), hadamard=128, rms=3.0)),
}


def test_second_row_in_flight_where_it_is_free() -> None:
    assert variant_of("plain", DUAL_8192, False, False).stages == 2
    assert variant_of("silu", layout_of((14336, 4, 4)), False, False).stages == 1
    assert variant_of("silu", layout_of((28672, 4, 4)), False, False).stages == 2
    for case in CASES.values():
        variant = case.variant
        blocks = variant.blocks_per_multiprocessor
        assert blocks * variant.threads <= 2048
        assert blocks * variant.shared_bytes <= 227 * 1024


def test_permuted_rows_share_tables() -> None:
    wide = CASES["residual permuted"].variant
    assert (wide.groups, wide.blocks_per_multiprocessor) == (3, 1)
    assert variant_of("rmsnorm_residual", layout_of((3584, 4, 4), (512, 8, 8)), True, True).groups == 6
    assert CASES["residual"].variant.groups == 1
    with pytest.raises(ValueError, match="too many groups"):
        QuantizeVariant("plain", 8192, (8,), groups=5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 100, 2048, 4097])
def test_rows_are_shared_out_evenly(name: str, rows: int) -> None:
    variant = CASES[name].variant
    for chosen in (variant, for_few_rows(variant)):
        blocks, owners = quantize_sm90.share_out(chosen, rows, 132)
        shares = [len(range(owner, rows, owners)) for owner in range(owners)]
        assert sum(shares) == rows and max(shares) - min(shares) <= 1
        clusters = blocks // chosen.cluster
        assert blocks <= chosen.blocks_per_multiprocessor * 132 and owners <= clusters * chosen.groups
        assert clusters == owners or blocks > chosen.blocks_per_multiprocessor * 132 - chosen.cluster


def test_threads_cover_the_channels() -> None:
    for channels, threads in ((64, 32), (576, 32), (1024, 32), (1032, 64), (8192, 256), (28672, 896), (32768, 1024)):
        assert QuantizeVariant("plain", channels, (8,)).threads == threads


def test_few_wide_swiglu_rows_are_shared_by_blocks() -> None:
    for channels, cluster, threads in ((14336, 7, 64), (28672, 7, 128), (8192, 8, 32), (11264, 1, 352), (1536, 1, 64)):
        variant = for_few_rows(QuantizeVariant("silu", channels, (8, 8), 128))
        assert (variant.cluster, variant.threads, variant.cluster * variant.block_channels) == (
            cluster,
            threads,
            channels,
        )
        assert variant.is_full == (channels % 1024 == 0)
    for variant in (CASES["plain wide"].variant, CASES["residual"].variant, CASES["swiglu permuted"].variant):
        assert for_few_rows(variant) is variant
    with pytest.raises(ValueError, match="cannot share a row"):
        QuantizeVariant("silu", 14336, (8,), cluster=3)


def test_rms_is_summed_only_where_it_bounds_a_scale() -> None:
    assert variant_of("plain", DUAL_576, False, False).rms_clip
    assert not variant_of("plain", layout_of((576, 4, 4)), False, False).rms_clip
    assert not variant_of("plain", DUAL_576.at("a8"), False, False).rms_clip


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (DUAL_576, None),
        (DUAL_576.at("a8"), None),
        (DUAL_576.at("a16"), "16-bit activations"),
        (replace(DUAL_576, symmetric=False), "asymmetric activations"),
        (replace(DUAL_576, symmetric=False).at("a8"), None),
        (layout_of((128, 8, 8), (128, 4, 4)), r"segments of \(8, 4\) bits"),
        (layout_of((40960, 4, 4)), "40960 channels"),
        (layout_of((60, 4, 4), (68, 8, 8)), "no multiple of 8"),
        (layout_of((256, 4, 4), hadamard=256), "a block Hadamard of 256"),
    ],
)
def test_what_the_kernels_do_not_take(layout: LinearLayout, reason: str | None) -> None:
    if reason is None:
        assert unsupported(layout) is None
        return
    with pytest.raises(ValueError, match=f"do not run .*{reason}"):
        quantize_sm90.quantize(torch.zeros(1, layout.in_features, dtype=torch.bfloat16), layout, None)


def test_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match=r"contiguous bfloat16 \[T, 576\], got torch.float32"):
        quantize_sm90.quantize(torch.zeros(1, 576), DUAL_576, None)
    with pytest.raises(ValueError, match=r"\[T, 1152\], got torch.bfloat16 \(1, 576\)"):
        quantize_sm90.silu_mul_quantize(torch.zeros(1, 576, dtype=torch.bfloat16), DUAL_576, None)


def test_names_are_unique() -> None:
    names = [case.variant.name for case in CASES.values()]
    assert len(set(names)) == len({case.variant for case in CASES.values()})
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for name in names)


@pytest.mark.parametrize("name", ["residual permuted", "swiglu permuted", "swiglu wide"])
def test_compiles_without_a_gpu(name: str, tmp_path: Path) -> None:
    """The register-hungriest, and one of a cluster: no spills, and no more registers than the launch counts on."""
    pytest.importorskip("cutlass")
    variant = for_few_rows(CASES[name].variant)
    registers, stack = resources(compile_to(quantize_sm90.kernel_of(variant), quantize_sm90.ARCH, tmp_path))
    assert 32 <= registers <= variant.registers
    assert stack == 0


def resources(object_file: Path) -> tuple[int, int]:
    """Registers and stack bytes of a thread: the cubin's .nv.info, EIATTR_REGCOUNT 0x2f, EIATTR_FRAME_SIZE 0x11."""
    content = object_file.read_bytes()

    def attributes(code: int) -> list[int]:
        pieces = content.split(bytes([4, code, 8, 0]))[1:]  # sized value, attribute, 8 bytes: symbol index, value
        return [int.from_bytes(piece[4:8], "little") for piece in pieces]

    return max(attributes(0x2F)), max(attributes(0x11))


# On the GPU


def inputs_of(case: Case, tokens: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """x, residual, gain and permutation, on the CPU."""
    generator = torch.Generator().manual_seed(tokens)
    k = case.layout.in_features

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x = random(tokens, 2 * k if case.source == "silu" else k)
    if tokens > 2:
        x[1] = 0  # a token of zeros
        x[2, : k // 2] *= 100
    residual = random(tokens, k) if case.source == "rmsnorm_residual" else None
    weight = random(k) if case.weighted else None
    return x, residual, weight, torch.randperm(k, generator=generator).int() if case.permuted else None


def run(case: Case, *inputs: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    x, residual, weight, perm = (None if tensor is None else tensor.cuda() for tensor in inputs)
    assert x is not None
    if case.source == "silu":
        return None, *quantize_sm90.silu_mul_quantize(x, case.layout, perm)
    if case.source == "plain":
        return None, *quantize_sm90.quantize(x, case.layout, perm)
    return quantize_sm90.rmsnorm_quantize(x, residual, weight, EPS, case.layout, perm)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 17, 700])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, tokens: int) -> None:
    """Bit for bit where nothing is summed or transformed; else codes may move by one where a value lies on a tie."""
    case = CASES[name]
    layout = case.layout
    x, residual, weight, perm = inputs_of(case, tokens)
    wide = x.float()
    if case.source == "silu":
        gate, up = wide.chunk(2, 1)
        wide = torch.nn.functional.silu(gate) * up
    elif case.source != "plain":
        hidden = x if residual is None else x + residual
        wide = rms_norm(hidden.float(), None if weight is None else weight.float(), EPS)
    expected = quantize_activation(wide, layout, perm)
    expected_codes, expected_scales = lanes(expected.codes, expected.scales, layout)
    hidden_out, codes, scales = run(case, x, residual, weight, perm)
    if residual is not None:
        assert hidden_out is not None and torch.equal(hidden_out.cpu(), x + residual)
    codes, scales = codes.cpu(), scales.cpu()
    if case.source == "plain" and not case.variant.rms_clip and layout.hadamard == 1:
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes, expected_codes)
        return
    assert torch.allclose(scales, expected_scales, rtol=1e-5 if case.source != "silu" else 1e-4, atol=0)
    units = lanes(torch.ones_like(codes), expected.scales, layout)[0]
    difference = (codes.int() - expected_codes.int()).abs()
    assert (difference % units == 0).all()  # nothing in the low half of a 4-bit lane
    assert (difference <= units).all()
    assert (difference > 0).float().mean() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["residual permuted", "swiglu hadamard", "swiglu wide", "plain dual"])
def test_a_row_does_not_depend_on_its_batch_or_the_run(name: str) -> None:
    case = CASES[name]
    x, residual, weight, perm = inputs_of(case, 600)
    _, codes, scales = run(case, x, residual, weight, perm)
    for index in (0, 299, 599):
        alone = slice(index, index + 1)
        part = run(case, x[alone], None if residual is None else residual[alone], weight, perm)
        assert torch.equal(part[1][0], codes[index]) and torch.equal(part[2][0], scales[index])
    again = run(case, x, residual, weight, perm)
    assert torch.equal(again[1], codes) and torch.equal(again[2], scales)


@pytest.mark.gpu
def test_every_output_is_written() -> None:
    case = CASES["residual"]
    x, residual, weight, perm = (None if t is None else t.cuda() for t in inputs_of(case, 300))
    assert x is not None and residual is not None
    hidden = torch.full_like(x, float("nan"))
    codes = torch.full(x.shape, 99, dtype=torch.int8, device="cuda")
    scales = torch.full((300, 2), float("nan"), device="cuda")
    quantize_sm90.launch(case.variant, x, residual, weight, perm, hidden, codes, scales, EPS, case.layout)
    assert torch.equal(hidden, x + residual)
    assert not scales.isnan().any()
    assert not (codes == 99)[:, :7168].any()


@pytest.mark.gpu
def test_no_rows() -> None:
    codes, scales = quantize_sm90.quantize(torch.empty(0, 576, dtype=torch.bfloat16, device="cuda"), DUAL_576, None)
    assert codes.shape == (0, 576) and scales.shape == (0, 2)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    case = CASES["swiglu"]
    x = inputs_of(case, 40)[0].cuda()
    expected = quantize_sm90.silu_mul_quantize(x, case.layout, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, scales = quantize_sm90.silu_mul_quantize(x, case.layout, None)
    codes.zero_()
    scales.zero_()
    graph.replay()
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])


def test_hadamard_reference_is_what_the_kernel_does() -> None:
    """The stages in the kernel's order on one block, written out: the reference's bits."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(0))
    values = x.tolist()
    tensor = torch.tensor(values)
    for distance in (1, 2, 4, 8, 16, 32, 64):
        index = torch.arange(128)
        low = index & distance == 0
        partner = tensor[index ^ distance]
        tensor = torch.where(low, tensor + partner, partner - tensor)
    assert torch.equal(tensor * torch.tensor(128**-0.5), block_hadamard(x, 128))
