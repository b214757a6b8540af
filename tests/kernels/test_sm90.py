"""`kernels.sm90`: which path a layout takes (anywhere), and that path through `kernels.ops` against the CPU (GPU)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from w4a4.kernels import ops, sm90
from w4a4.kernels.layout import LinearLayout, Segment

DUAL = LinearLayout(320, (Segment(448, 4, 4), Segment(128, 8, 8)), (0.95, 3.0), hadamard=64)
LAYOUTS = {
    "w4a4": LinearLayout(320, (Segment(512, 4, 4),), (0.95, 3.0)),
    "dual": DUAL,
    "dual a8": DUAL.at("a8"),
    "fmpq": LinearLayout(320, (Segment(384, 4, 4), Segment(128, 8, 4))),
    "w8a8": LinearLayout(320, (Segment(512, 8, 8),)),
    "quik": LinearLayout(320, (Segment(512, 4, 4), Segment(64, 16, 16)), symmetric=False),
    "w4a16": LinearLayout(320, (Segment(512, 16, 4),), group_size=128),
    "dual a16": DUAL.at("a16"),
    "wide hadamard": LinearLayout(320, (Segment(512, 4, 4),), hadamard=256),
}


def test_paths_name_what_runs() -> None:
    paths = {name: sm90.path(layout) for name, layout in LAYOUTS.items()}
    assert paths["w4a4"] == "int8-wgmma sm_90 (w4a4)"
    assert paths["dual"] == "int8-wgmma sm_90 (w4a4+w8a8)"
    assert paths["dual a8"] == "int8-wgmma sm_90 (w4a8+w8a8)"
    assert paths["fmpq"] == "int8-wgmma sm_90 (w4a4+w4a8)"
    assert paths["w4a16"].startswith("bf16-cublas sm_90 (w4a16, dequantised at load")
    assert paths["quik"].startswith("bf16-cublas sm_90 (w4a4+w16a16, dequantised at load")
    assert paths["wide hadamard"] == (
        "int8-wgmma sm_90 (w4a4, quantised by PyTorch: no kernel for a block Hadamard of 256)"
    )


@pytest.mark.parametrize("name", ["quik", "w4a16", "dual a16"])
def test_dequantised_path_multiplies_the_same(name: str) -> None:
    """What cuBLAS would do, on the CPU: within bf16 rounding of the exact path."""
    one = stored(LAYOUTS[name])
    exact = ops.prepare_linear(one.layout, one.weights, one.weight_scales, None, one.bias)
    x = random_input(one.layout, 9)
    expected = ops.linear_forward(ops.quantize_activation(x, exact), exact)
    held, row_sums = sm90.prepare_weights(one.layout, one.weights, one.weight_scales, one.bias, torch.device("cpu"))
    assert row_sums is None and [(w.dtype, w.shape) for w in held] == [
        (torch.bfloat16, (one.layout.out_features, one.layout.in_features))
    ]
    y = sm90.linear(sm90.quantize(x, one.layout, None), held, one.weight_scales, None, one.bias, one.layout)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).norm() / expected.norm() < 0.01


@dataclass(frozen=True)
class Stored:
    layout: LinearLayout
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    perm: Tensor | None
    bias: Tensor | None


def stored(layout: LinearLayout, seed: int = 0, perm: Tensor | None = None) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    n = layout.out_features
    weights = tuple(
        torch.randn(n, s.width, generator=generator).bfloat16()
        if s.weight_bits == 16
        else torch.randint(-8, 8, (n, s.width), dtype=torch.int8, generator=generator)
        for s in layout.segments
    )
    scales = torch.rand(n, layout.num_scales, generator=generator) * 0.02 + 0.01
    return Stored(layout, weights, scales, perm, torch.randn(n, generator=generator))


def random_input(layout: LinearLayout, rows: int, parts: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, parts * layout.in_features, generator=generator).bfloat16()


def to_device(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_linears_equal_the_cpu(name: str, rows: int) -> None:
    """q|k|v-like: three linears of odd sizes as one, through every way in."""
    layout = LAYOUTS[name]
    perm = torch.randperm(layout.in_features, generator=torch.Generator().manual_seed(1)).int()
    parts = [stored(replace(layout, out_features=n), n, perm) for n in (192, 64, 64)]
    on_gpu, on_cpu = ops.fuse_linears(parts, "cuda"), ops.fuse_linears(parts)
    assert ops.path_of(on_gpu) == sm90.path(layout)
    x, residual, gate_up = random_input(layout, rows), random_input(layout, rows).flip(0), random_input(layout, rows, 2)
    gain = random_input(layout, 1)[0]
    ways: list[tuple[Any, Any]] = [
        (ops.quantize_activation(x.cuda(), on_gpu), ops.quantize_activation(x, on_cpu)),
        (ops.silu_mul_quantize(gate_up.cuda(), on_gpu), ops.silu_mul_quantize(gate_up, on_cpu)),
    ]
    hidden, normed = ops.rmsnorm_quantize(*to_device(x, residual, gain), 1e-5, on_gpu)
    expected_hidden, expected = ops.rmsnorm_quantize(x, residual, gain, 1e-5, on_cpu)
    assert torch.equal(hidden.cpu(), expected_hidden)
    ways.append((normed, expected))
    for ours, theirs in ways:
        y = ops.linear_forward(ours, on_gpu)
        assert y.dtype == torch.bfloat16 and y.shape == (rows, 320)
        reference = ops.linear_forward(theirs, on_cpu)
        assert (y.cpu().float() - reference).norm() / reference.norm() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4a4", "dual", "dual a8"])
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    layout = LAYOUTS[name]
    linear = ops.fuse_linears([stored(layout)], "cuda")
    x = random_input(layout, 200).cuda()
    y = ops.linear_forward(ops.quantize_activation(x, linear), linear)
    for index in (0, 77, 199):
        alone = ops.linear_forward(ops.quantize_activation(x[index : index + 1].clone(), linear), linear)
        assert torch.equal(alone[0], y[index])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dual", "quik"])
def test_opcheck(name: str) -> None:
    layout = LAYOUTS[name]
    linear = ops.fuse_linears([stored(layout)], "cuda")
    geometry, clip = ops._encoded(layout)
    x, gate_up = random_input(layout, 5).cuda(), random_input(layout, 5, 2).cuda()
    activation = ops.quantize_activation(x, linear)
    product = (
        activation.codes,
        activation.scales,
        activation.zeros,
        activation.unquantized,
        list(linear.weights),
        linear.weight_scales,
        linear.row_sums,
        linear.bias,
        geometry,
    )
    registered = torch.ops.w4a4
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (registered.quantize_activation.default, (x, None, geometry, clip)),
        (registered.rmsnorm_quantize.default, (x, x.flip(0), None, 1e-5, None, geometry, clip)),
        (registered.silu_mul_quantize.default, (gate_up, None, geometry, clip)),
        (registered.w4ax_gemm.default, product),
    ]
    for operator, arguments in calls:
        results = torch.library.opcheck(operator, arguments)
        assert set(results.values()) == {"SUCCESS"}, (operator, results)


@pytest.mark.gpu
def test_compile_and_cuda_graph() -> None:
    linear = ops.fuse_linears([stored(replace(DUAL, out_features=576))], "cuda")
    x, residual = random_input(DUAL, 8).cuda(), random_input(DUAL, 8).flip(0).cuda()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden, activation = ops.rmsnorm_quantize(x, residual, None, 1e-5, linear)
        y = ops.linear_forward(activation, linear)
        return hidden, ops.linear_forward(ops.quantize_activation(y, linear), linear)

    expected = block(x, residual)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(x, residual)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(x, residual)
    for output in captured:
        output.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
