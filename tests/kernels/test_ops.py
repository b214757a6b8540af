"""`kernels.ops`: preparing and fusing linears, dispatch, refusals, and the operators' contracts with PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from w4a4.kernels import ops
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import QuantizedActivation, quantize_activation, rms_norm, w4ax_gemm

DUAL = LinearLayout(24, (Segment(128, 4, 4), Segment(64, 8, 8)), (0.95, 3.0), hadamard=64)
QUIK = LinearLayout(24, (Segment(128, 4, 4), Segment(64, 16, 16)), symmetric=False)
W4A16 = LinearLayout(24, (Segment(192, 16, 4),), group_size=64)
LAYOUTS = {"dual": DUAL, "quik": QUIK, "w4a16": W4A16}


@dataclass(frozen=True)
class Stored:
    layout: LinearLayout
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    perm: Tensor | None
    bias: Tensor | None


def stored(layout: LinearLayout, seed: int = 0, perm: Tensor | None = None, has_bias: bool = True) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    n = layout.out_features
    weights = tuple(
        torch.randn(n, s.width, generator=generator).bfloat16()
        if s.weight_bits == 16
        else torch.randint(-8, 8, (n, s.width), dtype=torch.int8, generator=generator)
        for s in layout.segments
    )
    scales = torch.rand(n, layout.num_scales, generator=generator) + 0.01
    return Stored(layout, weights, scales, perm, torch.randn(n, generator=generator) if has_bias else None)


def prepared(layout: LinearLayout, **options: Any) -> ops.RuntimeLinear:
    one = stored(layout, **options)
    return ops.prepare_linear(one.layout, one.weights, one.weight_scales, one.perm, one.bias)


def random_input(columns: int = 192, rows: int = 5) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(9))


def random_perm() -> Tensor:
    return torch.randperm(192, generator=torch.Generator().manual_seed(8)).int()


def expected_output(one: Stored, x: Tensor) -> Tensor:
    activation = quantize_activation(x, one.layout, one.perm)
    return w4ax_gemm(activation, one.weights, one.weight_scales, one.layout, one.bias)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_way_in_equals_the_reference(name: str) -> None:
    one = stored(LAYOUTS[name], perm=random_perm())
    linear = ops.prepare_linear(one.layout, one.weights, one.weight_scales, one.perm, one.bias)
    x, residual, weight, gate_up = random_input(), random_input().flip(0), random_input(rows=1)[0], random_input(384)
    close = {"rtol": 1e-5, "atol": 1e-4}

    y = ops.linear_forward(ops.quantize_activation(x, linear), linear)
    assert torch.allclose(y, expected_output(one, x), **close)

    hidden, quantized = ops.rmsnorm_quantize(x, residual, weight, 1e-5, linear)
    assert torch.equal(hidden, x + residual)
    expected = expected_output(one, rms_norm(x + residual, weight, 1e-5))
    assert torch.allclose(ops.linear_forward(quantized, linear), expected, **close)

    hidden, quantized = ops.rmsnorm_quantize(x, None, None, 1e-5, linear)
    assert hidden is x
    assert torch.allclose(ops.linear_forward(quantized, linear), expected_output(one, rms_norm(x, None, 1e-5)), **close)

    y = ops.linear_forward(ops.silu_mul_quantize(gate_up, linear), linear)
    inner = torch.nn.functional.silu(gate_up[:, :192]) * gate_up[:, 192:]
    assert torch.allclose(y, expected_output(one, inner), **close)


@pytest.mark.parametrize("act", ["map", "a8", "a16"])
def test_fused_linears_are_the_linears_side_by_side(act: Any) -> None:
    perm = random_perm()
    parts = [stored(replace(DUAL, out_features=n), n, perm.clone(), has_bias=n != 8) for n in (16, 8, 8)]
    fused = ops.fuse_linears(parts, act=act)
    assert fused.out_sizes == (16, 8, 8)
    assert fused.layout == replace(DUAL.at(act), out_features=32)
    x = random_input()
    outputs = ops.linear_forward(ops.quantize_activation(x, fused), fused).split(fused.out_sizes, dim=1)
    for y, part in zip(outputs, parts, strict=True):
        expected = expected_output(replace(part, layout=part.layout.at(act)), x)
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_fusing_refuses_linears_that_differ() -> None:
    perm = random_perm()
    first = stored(DUAL, perm=perm)
    with pytest.raises(ValueError, match="share segments"):
        ops.fuse_linears([first, stored(replace(DUAL, segments=(Segment(192, 4, 4),)), perm=perm)])
    with pytest.raises(ValueError, match="share clip"):
        ops.fuse_linears([first, stored(replace(DUAL, clip=(1.0, 3.0)), perm=perm)])
    for other in (None, perm.flip(0)):
        with pytest.raises(ValueError, match="share their input permutation"):
            ops.fuse_linears([first, stored(DUAL, perm=other)])
    with pytest.raises(ValueError, match="at least one"):
        ops.fuse_linears([])


def test_cpu_path_and_refused_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.path_of(prepared(DUAL)) == "reference-cpu"
    with pytest.raises(ops.UnsupportedDeviceError, match=r"kernels for meta.*sm_90.*'cpu'"):
        ops.backend_of("meta")
    monkeypatch.setattr(ops, "_cuda_properties", lambda index: ("NVIDIA A100", (8, 0)))
    with pytest.raises(ops.UnsupportedDeviceError, match=r"NVIDIA A100 \(sm_80\).*sm_90"):
        ops.backend_of("cuda:0")


def test_stored_linears_are_checked() -> None:
    one = stored(DUAL)

    def prepare(**changes: Any) -> None:
        changed = replace(one, **changes)
        ops.prepare_linear(changed.layout, changed.weights, changed.weight_scales, changed.perm, changed.bias)

    with pytest.raises(ValueError, match="got 1 for 2 segments"):
        prepare(weights=one.weights[:1])
    with pytest.raises(ValueError, match=r"segment 1 must be \(24, 64\), got \(24, 32\)"):
        prepare(weights=(one.weights[0], one.weights[1][:, :32]))
    with pytest.raises(ValueError, match="segment 0 must be int8, got torch.float32"):
        prepare(weights=(one.weights[0].float(), one.weights[1]))
    with pytest.raises(ValueError, match=r"weight_scales must be float32 \(24, 2\), got torch.float32 \(24, 1\)"):
        prepare(weight_scales=one.weight_scales[:, :1])
    with pytest.raises(ValueError, match=r"weight_scales must be float32 .* got torch.float64"):
        prepare(weight_scales=one.weight_scales.double())
    with pytest.raises(ValueError, match=r"perm must be int \[192\]"):
        prepare(perm=random_perm()[:64])
    with pytest.raises(ValueError, match="perm must hold each of 0 to 191 once"):
        prepare(perm=torch.zeros(192, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bias must be \[24\], got \(23,\)"):
        prepare(bias=torch.zeros(23))
    with pytest.raises(ValueError, match="scales per group need 16-bit activations"):
        prepare(layout=replace(DUAL, group_size=64), weight_scales=torch.ones(24, 3))
    with pytest.raises(ValueError, match="Hadamard of 128 does not divide 192"):
        prepare(layout=replace(DUAL, hadamard=128))


def test_activations_are_checked() -> None:
    linear, x = prepared(DUAL), random_input()
    with pytest.raises(ValueError, match=r"x must be \[T, 192\], got \[5, 64\]"):
        ops.quantize_activation(x[:, :64].contiguous(), linear)
    with pytest.raises(ValueError, match="x must be float32 or bfloat16 or float16 on cpu, got torch.float64"):
        ops.quantize_activation(x.double(), linear)
    with pytest.raises(ValueError, match="x is on meta, the linear on cpu"):
        ops.quantize_activation(x.to("meta"), linear)
    with pytest.raises(ValueError, match=r"x must be contiguous, got strides \(1, 192\)"):
        ops.quantize_activation(torch.zeros(192, 192).T, linear)
    with pytest.raises(ValueError, match=r"gate_up must be \[T, 384\], got \[5, 192\]"):
        ops.silu_mul_quantize(x, linear)
    with pytest.raises(ValueError, match="residual must be torch.float32"):
        ops.rmsnorm_quantize(x, x.bfloat16(), None, 1e-5, linear)
    with pytest.raises(ValueError, match=r"norm weight must be torch.float32 \(192,\) on cpu, got torch.bfloat16"):
        ops.rmsnorm_quantize(x, None, torch.ones(192).bfloat16(), 1e-5, linear)


def test_quantised_activations_are_checked() -> None:
    linear = prepared(QUIK)
    activation = ops.quantize_activation(random_input(), linear)
    broken: list[tuple[str, dict[str, Tensor | None]]] = [
        (r"codes must be contiguous int8 \[T, 128\]", {"codes": activation.codes[:, :64].contiguous()}),
        (r"codes must be contiguous int8 \[T, 128\]", {"codes": activation.codes.to(torch.int32)}),
        (r"scales must be float32 \[5, 1\]", {"scales": activation.scales[:3]}),
        ("zero points", {"zeros": None}),
        (r"unquantized must be \[T, 64\], got None", {"unquantized": None}),
    ]
    for message, change in broken:
        with pytest.raises(ValueError, match=message):
            ops.linear_forward(replace(activation, **change), linear)  # type: ignore[arg-type]


def operator_calls(layout: LinearLayout) -> list[tuple[Any, tuple[Any, ...]]]:
    linear = prepared(layout, perm=random_perm())
    geometry, clip = ops._encoded(layout)
    x, weight = random_input(), random_input(rows=1)[0]
    activation: QuantizedActivation = ops.quantize_activation(x, linear)
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
    return [
        (registered.quantize_activation.default, (x, linear.perm, geometry, clip)),
        (registered.quantize_activation.default, (x, None, geometry, clip)),
        (registered.rmsnorm_quantize.default, (x, x.flip(0), weight, 1e-5, linear.perm, geometry, clip)),
        (registered.rmsnorm_quantize.default, (x, None, None, 1e-5, None, geometry, clip)),
        (registered.silu_mul_quantize.default, (random_input(384), linear.perm, geometry, clip)),
        (registered.w4ax_gemm.default, product),
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_opcheck(name: str) -> None:
    for operator, arguments in operator_calls(LAYOUTS[name]):
        results = torch.library.opcheck(operator, arguments)
        assert set(results.values()) == {"SUCCESS"}, (operator, results)


def test_compiles_to_one_graph() -> None:
    """torch.compile sees through the door: no graph breaks, no warnings, the same numbers."""
    linear = prepared(DUAL, perm=random_perm())

    def block(x: Tensor, residual: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        hidden, activation = ops.rmsnorm_quantize(x, residual, None, 1e-5, linear)
        y = ops.linear_forward(activation, linear)
        return hidden, y + ops.linear_forward(ops.silu_mul_quantize(gate_up, linear), linear)

    inputs = random_input(), random_input().flip(0), random_input(384)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for ours, expected in zip(compiled(*inputs), block(*inputs), strict=True):
        assert torch.equal(ours, expected)


def test_layouts_cross_an_operator_unchanged() -> None:
    for layout in (*LAYOUTS.values(), LinearLayout(7, (Segment(64, 8, 4),))):
        geometry, clip = ops._encoded(layout)
        assert ops._decoded(tuple(geometry), tuple(clip)) == layout
