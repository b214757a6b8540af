"""`kernels.cpu`: the reference's results, and a token's result that does not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from w4a4.kernels import cpu
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import QuantizedActivation, quantize_activation, rms_norm, w4ax_gemm

LAYOUTS = {
    "w4a4": LinearLayout(48, (Segment(576, 4, 4),), (0.9, 2.5)),
    "w8a8": LinearLayout(48, (Segment(576, 8, 8),)),
    "dual": LinearLayout(48, (Segment(448, 4, 4), Segment(128, 8, 8)), (0.95, 3.0), hadamard=64),
    "dual a8": LinearLayout(48, (Segment(448, 8, 4), Segment(128, 8, 8))),
    "quik": LinearLayout(48, (Segment(512, 4, 4), Segment(64, 16, 16)), symmetric=False),
    "w4a16": LinearLayout(48, (Segment(576, 16, 4),), group_size=64),
    "dual a16": LinearLayout(48, (Segment(448, 16, 4), Segment(128, 16, 8)), hadamard=64),
}
# 56 rows of 576 channels are one piece; 23 rows are not a multiple of a float tile.
ROWS = 131


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_linear(layout: LinearLayout, seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = layout.out_features
    weights = tuple(
        torch.randn(n, s.width, generator=generator).bfloat16()
        if s.weight_bits == 16
        else torch.randint(-8 if s.weight_bits == 4 else -127, 8 if s.weight_bits == 4 else 128, (n, s.width),
                           dtype=torch.int8, generator=generator)
        for s in layout.segments
    )  # fmt: skip
    scales = torch.rand(n, layout.num_scales, generator=generator) + 0.01
    return weights, scales, torch.randn(n, generator=generator)


def random_input(columns: int = 576, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same(ours: QuantizedActivation, theirs: QuantizedActivation) -> None:
    for name in ("codes", "scales", "zeros", "unquantized"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def row(activation: QuantizedActivation, index: int) -> QuantizedActivation:
    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[index : index + 1]

    return QuantizedActivation(
        activation.codes[index : index + 1],
        activation.scales[index : index + 1],
        cut(activation.zeros),
        cut(activation.unquantized),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_quantisers_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    layout, x = LAYOUTS[name], random_input(dtype=dtype)
    perm = torch.randperm(576, generator=torch.Generator().manual_seed(2)).int()
    weight, residual = random_input(rows=1, dtype=dtype)[0], random_input(dtype=dtype).roll(1, 0)
    assert_same(cpu.quantize(x, layout, perm), quantize_activation(x.float(), layout, perm))

    hidden, quantized = cpu.rmsnorm_quantize(x, residual, weight, 1e-5, layout, perm)
    assert torch.equal(hidden, x + residual)
    assert_same(quantized, quantize_activation(rms_norm((x + residual).float(), weight.float(), 1e-5), layout, perm))

    gate_up = random_input(2 * 576, dtype=dtype)
    gate, up = gate_up[:, :576].float(), gate_up[:, 576:].float()
    expected = quantize_activation(torch.nn.functional.silu(gate) * up, layout, perm)
    assert_same(cpu.silu_mul_quantize(gate_up, layout, perm), expected)


@pytest.mark.parametrize("exact", [True, False], ids=["int8", "float32 chunks"])
@pytest.mark.parametrize("rows", [0, 1, 3, ROWS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_linear_equals_the_reference(name: str, rows: int, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if exact and not cpu.has_exact_int_mm():
        pytest.skip("torch._int_mm saturates on this processor")
    monkeypatch.setattr(cpu, "has_exact_int_mm", lambda: exact)
    layout = LAYOUTS[name]
    weights, scales, bias = random_linear(layout)
    activation = quantize_activation(random_input(rows=rows), layout)
    held, row_sums = cpu.prepare_weights(layout, weights, scales, bias, torch.device("cpu"))
    expected = w4ax_gemm(activation, weights, scales, layout, bias)
    y = cpu.linear(activation, held, scales, row_sums, bias, layout)
    assert y.shape == (rows, 48) and y.dtype == torch.float32
    if any(segment.act_bits == 16 for segment in layout.segments):
        assert torch.allclose(y, expected, rtol=1e-4, atol=1e-3)
    else:
        assert torch.equal(y, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    layout = LAYOUTS[name]
    x, gate_up, weight = random_input(), random_input(2 * 576), random_input(rows=1)[0]
    weights, scales, bias = random_linear(layout)
    held, row_sums = cpu.prepare_weights(layout, weights, scales, bias, torch.device("cpu"))
    steps: list[tuple[Tensor, Callable[[Tensor], QuantizedActivation]]] = [
        (x, lambda rows: cpu.quantize(rows, layout, None)),
        (x, lambda rows: cpu.rmsnorm_quantize(rows, None, weight, 1e-5, layout, None)[1]),
        (gate_up, lambda rows: cpu.silu_mul_quantize(rows, layout, None)),
    ]
    for inputs, step in steps:
        batch = step(inputs)
        y = cpu.linear(batch, held, scales, row_sums, bias, layout)
        for start, stop in ((0, 1), (17, 18), (ROWS - 1, ROWS), (5, 28)):
            part = step(inputs[start:stop].clone())
            for offset, index in enumerate(range(start, stop)):
                assert_same(row(part, offset), row(batch, index))
            assert torch.equal(cpu.linear(part, held, scales, row_sums, bias, layout), y[start:stop])


def test_silu_tails_do_not_depend_on_the_batch() -> None:
    """4,864 / 2 channels leave a tail behind every vector width, and a row straddles PyTorch's grain."""
    layout = LinearLayout(8, (Segment(2419, 8, 8),))
    gate_up = random_input(2 * 2419, rows=40)
    batch = cpu.silu_mul_quantize(gate_up, layout, None)
    for index in range(40):
        assert_same(cpu.silu_mul_quantize(gate_up[index : index + 1].clone(), layout, None), row(batch, index))


def test_rows_wider_than_the_grain() -> None:
    layout = LinearLayout(8, (Segment(40960, 4, 4),), (1.0, 2.0))
    x = random_input(40960, rows=3)
    batch = cpu.quantize(x, layout, None)
    for index in range(3):
        assert_same(cpu.quantize(x[index : index + 1].clone(), layout, None), row(batch, index))


def test_tiled_matmul() -> None:
    x, weight = random_input(rows=19), random_input(rows=7)
    expected = x.double() @ weight.double().T
    assert torch.allclose(cpu.tiled_matmul(x, weight).double(), expected, atol=1e-4)
    assert cpu.tiled_matmul(x[:0], weight).shape == (0, 7)


@pytest.mark.parametrize("width", [96, 576])
def test_head_matmul_gives_a_row_the_same_logits_in_any_batch(width: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(9, width, generator=generator), torch.randn(1000, width, generator=generator)
    y = cpu.head_matmul(x, weight)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    order = torch.randperm(9, generator=generator)
    assert torch.equal(cpu.head_matmul(x[order], weight), y[order])
    assert all(torch.equal(cpu.head_matmul(x[i : i + 1], weight)[0], y[i]) for i in range(9))
    assert cpu.head_matmul(x[:0], weight).shape == (0, 1000)
