"""The Hopper GEMM. On a CPU: every variant that can be chosen compiles as it should. On a GPU: it is exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from w4a4.kernels.gemm_sm90 import gemm, lanes, run
from w4a4.kernels.gemm_sm90_variant import Plan
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.prepack_sm90 import PrepackedLinear, prepack
from w4a4.kernels.tuning_sm90 import choose

W4 = (Segment(512, 4, 4),)
DUAL = (Segment(448, 4, 4), Segment(128, 8, 8))
LAYOUTS = {
    "w4": W4,
    "one block": (Segment(128, 4, 4),),
    "dual": DUAL,
    "dual short": (Segment(256, 4, 4), Segment(256, 8, 8)),
    "dual long": (Segment(3584, 4, 4), Segment(512, 8, 8)),
    "dual under int8 activations": (Segment(3584, 8, 4), Segment(512, 8, 8)),
    "int4 under int8 activations": (Segment(384, 4, 4), Segment(128, 8, 4)),
    "w8a8": (Segment(384, 8, 8),),
}


@dataclasses.dataclass(frozen=True)
class Case:
    codes: Tensor
    scales: Tensor
    linear: PrepackedLinear
    exact: Tensor  # float64 [T, N]
    slack: Tensor  # float64 [T, N]: what float32 arithmetic of the epilogue may be off by


def make_case(
    segments: tuple[Segment, ...], tokens: int, rows: int, unit: bool = False, aligned: bool = False, seed: int = 0
) -> Case:
    """Random operands over their whole range.

    `unit`: scales 1 and codes so small that bf16 holds every result. `aligned`: none negative, so that sums are large.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def integers(bound: int, *shape: int) -> Tensor:
        return torch.randint(-bound - 1, bound + 1, shape, generator=generator, device="cuda", dtype=torch.int8)

    layout = LinearLayout(rows, segments)
    codes = [integers(0 if unit else 2 ** (s.act_bits - 1) - 1, tokens, s.width) for s in segments]
    weights = [integers(0 if unit else 2 ** (s.weight_bits - 1) - 1, rows, s.width) for s in segments]
    if unit:  # 128 nonzero products at most: results in [0, 128]
        for code in codes:
            code[:, 128 // len(codes) :] = 0
    if aligned:
        codes, weights = [code.clamp(min=0) for code in codes], [weight.clamp(min=0) for weight in weights]
    ones = torch.ones(tokens, rows, dtype=torch.float64, device="cuda")
    scales = torch.rand(tokens, len(segments), generator=generator, device="cuda") + 0.5
    weight_scales = torch.rand(rows, len(segments), generator=generator, device="cuda") + 0.5
    bias = torch.randn(rows, generator=generator, device="cuda") * 1000
    if unit:
        scales.fill_(1)
        weight_scales.fill_(1)
        bias.fill_(0)
    exact, magnitude = ones * bias.double(), ones * bias.double().abs()
    for i, (code, weight) in enumerate(zip(codes, weights, strict=True)):
        part = (code.double() @ weight.double().T) * scales[:, i, None].double() * weight_scales[:, i].double()
        exact, magnitude = exact + part, magnitude + part.abs()
    return Case(
        *lanes(torch.cat(codes, 1), scales, layout),
        prepack(layout, tuple(weights), weight_scales, None if unit else bias, "cuda"),
        exact,
        magnitude * 2.0**-21,
    )


def check(y: Tensor, case: Case) -> None:
    """Half a unit in bf16's last place (2**-8 relative at worst) plus float32 slack, everywhere."""
    error = (y.double() - case.exact).abs()
    assert bool((error <= case.exact.abs() * 2.0**-8 + case.slack).all()), float(error.max())


def test_lanes_hold_the_same_products() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (3, 576), generator=generator, dtype=torch.int8)
    codes[:, 448:] *= 15
    scales = torch.rand(3, 2, generator=generator)
    moved, moved_scales = lanes(codes, scales, LinearLayout(8, DUAL))
    assert moved.dtype == torch.int8
    assert torch.equal(moved[:, 448:], codes[:, 448:]) and torch.equal(moved_scales[:, 1], scales[:, 1])
    assert torch.equal(moved[:, :448].int(), codes[:, :448].int() * 16)
    assert torch.equal(moved_scales[:, 0] * 16, scales[:, 0])
    a8 = LinearLayout(8, DUAL).at("a8")
    assert all(torch.equal(a, b) for a, b in zip(lanes(codes, scales, a8), (codes, scales), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 129, 300])
@pytest.mark.parametrize("rows", [128, 576])
def test_product_equals_exact_arithmetic_up_to_bf16(name: str, tokens: int, rows: int) -> None:
    case = make_case(LAYOUTS[name], tokens, rows)
    out = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert gemm(case.codes, case.scales, case.linear, out) is out
    check(out, case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4", "dual", "dual short", "dual long", "dual under int8 activations"])
def test_large_odd_batch(name: str) -> None:
    """Several tiles for every block: a tile's output waits for its store while the next one is multiplied."""
    case = make_case(LAYOUTS[name], 4097, 3136)
    for _ in range(3):
        out = torch.full((4097, 3136), float("nan"), dtype=torch.bfloat16, device="cuda")
        check(gemm(case.codes, case.scales, case.linear, out), case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [5, 200])
def test_sums_are_the_integers_themselves(name: str, tokens: int) -> None:
    case = make_case(LAYOUTS[name], tokens, 192, unit=True)
    assert torch.equal(gemm(case.codes, case.scales, case.linear).double(), case.exact)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4", "dual"])
@pytest.mark.parametrize("tokens", [4, 100, 700])
@pytest.mark.parametrize("share", ["none", "rest", "all"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_way_to_share_tiles_gives_the_same_bits(name: str, tokens: int, share: str, cluster: int) -> None:
    case = make_case(LAYOUTS[name], tokens, 8192)
    bits = case.linear.weight_bits
    variant = choose(bits, 8192, 512, min(tokens, 100)).variant
    variant = dataclasses.replace(variant, cluster=cluster, shares_tiles=True)
    expected = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="cuda")
    run(case.codes, case.scales, case.linear, expected, Plan(variant))
    check(expected, case)
    for _ in range(5):
        out = torch.full_like(expected, float("nan"))
        run(case.codes, case.scales, case.linear, out, Plan(variant, 3, share))  # type: ignore[arg-type]
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dual long", "dual under int8 activations", "int4 under int8 activations"])
@pytest.mark.parametrize("aligned", [False, True])
def test_a_result_does_not_depend_on_the_tile(name: str, aligned: bool) -> None:
    """Tiles of 256 tokens keep a segment's sums in 16 bits, larger ones elsewhere too: the bits of an int32 sum."""
    case = make_case(LAYOUTS[name], 700, 1088, aligned=aligned)
    bits = case.linear.weight_bits
    small, large = (choose(bits, 1088, 0, tokens) for tokens in (100, 700))
    assert large.variant.packs_first and not small.variant.packs_first
    expected = torch.empty(700, 1088, dtype=torch.bfloat16, device="cuda")
    run(case.codes, case.scales, case.linear, expected, small)
    check(expected, case)
    for _ in range(3):
        out = torch.full_like(expected, float("nan"))
        run(case.codes, case.scales, case.linear, out, large)
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph() -> None:
    case = make_case(DUAL, 33, 256)
    expected = gemm(case.codes, case.scales, case.linear)
    out = torch.full_like(expected, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(case.codes, case.scales, case.linear, out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
