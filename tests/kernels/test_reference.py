"""`kernels.reference` against arithmetic that cannot be wrong: int64 sums, float64 products, values worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import (
    QuantizedActivation,
    block_hadamard,
    dequantize_kv,
    hadamard_matrix,
    integer_matmul,
    quantize_activation,
    quantize_asymmetric,
    quantize_kv,
    quantize_symmetric,
    rms_norm,
    w4ax_gemm,
)

INFINITE = float("inf")


def random_codes(rows: int, columns: int, bits: int, generator: torch.Generator) -> Tensor:
    limit = 2 ** (bits - 1)
    return torch.randint(-limit, limit, (rows, columns), dtype=torch.int8, generator=generator)


# Integer products


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 4),
    outputs=st.integers(1, 5),
    columns=st.integers(0, 2600),
    bits=st.sampled_from([(4, 4), (8, 4), (8, 8)]),
    seed=st.integers(0, 2**31),
)
def test_integer_matmul_is_exact(rows: int, outputs: int, columns: int, bits: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes, weight = (random_codes(n, columns, b, generator) for n, b in zip((rows, outputs), bits, strict=True))
    product = integer_matmul(codes, weight)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), codes.long() @ weight.long().T)


@pytest.mark.parametrize("columns", [1024, 1025, 28672])
def test_integer_matmul_is_exact_at_the_extremes(columns: int) -> None:
    """Same-signed extremes, with an odd last product so that a lost low bit would show."""
    codes = torch.full((2, columns), -128, dtype=torch.int8)
    weight = torch.full((3, columns), -128, dtype=torch.int8)
    codes[:, -1], weight[:, -1] = 127, 127
    assert torch.equal(integer_matmul(codes, weight).long(), codes.long() @ weight.long().T)


def exact_gemm(
    activation: QuantizedActivation, weights: tuple[Tensor, ...], weight_scales: Tensor, layout: LinearLayout
) -> Tensor:
    """The formula of the contract in int64 and float64."""
    y = torch.zeros(activation.scales.shape[0], layout.out_features, dtype=torch.float64)
    code_start = float_start = index = column = scale_index = 0
    for segment, weight in zip(layout.segments, weights, strict=True):
        stop = code_start + segment.width
        if segment.act_bits == 16:
            assert activation.unquantized is not None
            x = activation.unquantized[:, float_start : float_start + segment.width].double()
            w = weight.double()
            if layout.group_size:
                for start in range(0, segment.width, layout.group_size):
                    w[:, start : start + layout.group_size] *= weight_scales[
                        :, (column + start) // layout.group_size, None
                    ]
            elif segment.weight_bits < 16:
                w *= weight_scales[:, scale_index, None].double()
            y += x @ w.T
            float_start += segment.width
        else:
            codes = activation.codes[:, code_start:stop].long()
            product = (codes @ weight.long().T).double()
            if activation.zeros is not None:
                product -= activation.zeros[:, index, None].double() * weight.long().sum(1).double()
            y += activation.scales[:, index, None].double() * weight_scales[:, scale_index].double() * product
            code_start, index = stop, index + 1
        column += segment.width
        scale_index += segment.weight_bits < 16
    return y


LAYOUTS = {
    "w4a4": LinearLayout(24, (Segment(256, 4, 4),), (0.9, 2.5)),
    "dual": LinearLayout(24, (Segment(192, 4, 4), Segment(64, 8, 8)), (1.0, 3.0), hadamard=64),
    "fmpq": LinearLayout(24, (Segment(128, 4, 4), Segment(128, 8, 4))),
    "w8a8": LinearLayout(24, (Segment(256, 8, 8),)),
    "quik": LinearLayout(24, (Segment(224, 4, 4), Segment(32, 16, 16)), symmetric=False),
    "w4a16": LinearLayout(24, (Segment(256, 16, 4),), group_size=64),
    "dual a16": LinearLayout(24, (Segment(192, 16, 4), Segment(64, 16, 8))),
}


def random_linear(layout: LinearLayout, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
    weights = tuple(
        torch.randn(layout.out_features, segment.width, generator=generator).bfloat16()
        if segment.weight_bits == 16
        else random_codes(layout.out_features, segment.width, segment.weight_bits, generator)
        for segment in layout.segments
    )
    return weights, torch.rand(layout.out_features, layout.num_scales, generator=generator) + 0.01


@pytest.mark.parametrize("name", LAYOUTS)
def test_gemm_follows_the_contract(name: str) -> None:
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(0)
    weights, weight_scales = random_linear(layout, generator)
    bias = torch.randn(layout.out_features, generator=generator)
    perm = torch.randperm(layout.in_features, generator=generator)
    activation = quantize_activation(torch.randn(5, layout.in_features, generator=generator), layout, perm)
    expected = exact_gemm(activation, weights, weight_scales, layout) + bias
    y = w4ax_gemm(activation, weights, weight_scales, layout, bias)
    assert y.dtype == torch.float32
    assert (y - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised_product_is_near_the_float_one(name: str) -> None:
    """Codes, scales, zero points, order and transform fit together: the error is that of the activation's bits."""
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(1)
    weights, weight_scales = random_linear(layout, generator)
    perm = torch.randperm(layout.in_features, generator=generator)
    x = torch.randn(64, layout.in_features, generator=generator)
    y = w4ax_gemm(quantize_activation(x, layout, perm), weights, weight_scales, layout)
    float_layout = layout.at("a16")
    stored = block_hadamard(x[:, perm], layout.hadamard)
    nothing = torch.empty(64, 0)
    exact = exact_gemm(QuantizedActivation(nothing, nothing, None, stored), weights, weight_scales, float_layout)
    bits = min(segment.act_bits for segment in layout.segments)
    assert (y - exact).norm() / exact.norm() < {4: 0.17, 8: 0.012, 16: 1e-6}[bits]


# Quantisation of activations


def test_eight_bits_by_hand() -> None:
    codes, scale = quantize_symmetric(torch.tensor([[1.27, -1.27, 0.634, 0.0, 0.006, -0.004]]), 8, (1.0, INFINITE))
    assert codes.tolist() == [[127, -127, 63, 0, 1, 0]]
    assert scale.tolist() == pytest.approx([0.01])


def test_four_bits_use_minus_eight_when_clipped() -> None:
    """With c = 1 the scale is absmax / 7; a smaller c clips to 7 above and to -8 below."""
    x = torch.tensor([[7.0, -7.0, 3.4, 0.4]])
    assert quantize_symmetric(x, 4, (1.0, INFINITE))[0].tolist() == [[7, -7, 3, 0]]
    codes, scale = quantize_symmetric(x, 4, (0.5, INFINITE))
    assert codes.tolist() == [[7, -8, 7, 1]]
    assert scale.tolist() == [0.5]


def test_rms_bounds_the_clip() -> None:
    x = torch.tensor([[8.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, 1.0]])
    _, scale = quantize_symmetric(x, 4, (1.0, 1.5))
    assert scale.tolist() == pytest.approx([1.5 * 4 / 7, 1 / 7])


def test_ties_round_to_even() -> None:
    codes, _ = quantize_symmetric(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), 8, (1.0, INFINITE))
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_tokens_have_scale_zero(bits: int) -> None:
    codes, scale = quantize_symmetric(torch.zeros(2, 8), bits, (0.9, 2.0))
    assert not codes.any() and not scale.any()
    codes, scale, zero = quantize_asymmetric(torch.zeros(2, 8))
    assert not codes.any() and not scale.any() and not zero.any()


@settings(max_examples=50, deadline=None)
@given(bits=st.sampled_from([4, 8]), width=st.integers(1, 200), seed=st.integers(0, 2**31), power=st.integers(-20, 20))
def test_symmetric_error_is_half_a_step(bits: int, width: int, seed: int, power: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    codes, scale = quantize_symmetric(x, bits, (1.0, INFINITE))
    limit = 2 ** (bits - 1) - 1
    assert codes.abs().amax() == limit
    assert ((codes * scale[:, None] - x).abs() <= 0.5001 * scale[:, None]).all()


@settings(max_examples=50, deadline=None)
@given(width=st.integers(2, 200), seed=st.integers(0, 2**31), shift=st.floats(-50, 50))
def test_asymmetric_error_is_half_a_step(width: int, seed: int, shift: float) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) + shift
    codes, scale, zero = quantize_asymmetric(x)
    assert codes.min() >= -8 and codes.max() <= 7
    error = (scale[:, None] * (codes - zero[:, None]) - x).abs()
    assert (error <= 0.5001 * scale[:, None] + 1e-5 * (1 + abs(shift))).all()


def test_permutation_then_transform_then_segments() -> None:
    layout = LinearLayout(8, (Segment(64, 4, 4), Segment(64, 8, 8)), hadamard=64)
    generator = torch.Generator().manual_seed(2)
    x, perm = torch.randn(4, 128, generator=generator), torch.randperm(128, generator=generator)
    stored = (x[:, perm].reshape(4, 2, 64).double() @ hadamard_matrix(64).double()).reshape(4, 128)
    activation = quantize_activation(x, layout, perm)
    scale4, scale8 = stored[:, :64].abs().amax(1) / 7, stored[:, 64:].abs().amax(1) / 127
    assert torch.allclose(activation.scales.double(), torch.stack([scale4, scale8], 1), rtol=1e-6)
    assert ((activation.codes[:, :64] - stored[:, :64] / scale4[:, None]).abs() < 0.5001).all()
    assert ((activation.codes[:, 64:] - stored[:, 64:] / scale8[:, None]).abs() < 0.5001).all()


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[T, 256\], got \(2, 128\)"):
        quantize_activation(torch.zeros(2, 128), LAYOUTS["w4a4"])


# Transforms and norms


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_hadamard_matrix_is_orthogonal_and_symmetric(size: int) -> None:
    matrix = hadamard_matrix(size).double()
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.abs(), torch.full_like(matrix, matrix[0, 0].item()))


@pytest.mark.parametrize("block", [1, 2, 64, 128])
def test_block_hadamard_is_the_matrix_product(block: int) -> None:
    x = torch.randn(3, 2, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    matrix = hadamard_matrix(block).double()
    expected = (x.reshape(3, 2, -1, block) @ matrix).reshape(3, 2, 256)
    assert torch.allclose(block_hadamard(x, block), expected, atol=1e-6)
    assert torch.allclose(block_hadamard(block_hadamard(x, block), block), x, atol=1e-12)


def test_block_hadamard_computes_in_float32() -> None:
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(block_hadamard(x, 128), block_hadamard(x.float(), 128))


@pytest.mark.parametrize(("channels", "block"), [(192, 128), (96, 48)])
def test_block_hadamard_refuses_other_sizes(channels: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"divides {channels} channels, got {block}"):
        block_hadamard(torch.zeros(1, channels), block)


@pytest.mark.parametrize("size", [0, 12, 96])
def test_hadamard_matrix_refuses_other_sizes(size: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, got {size}"):
        hadamard_matrix(size)


def test_rms_norm() -> None:
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    assert torch.allclose(rms_norm(x, None, 0.0), torch.tensor([[1.2, 1.6, 0.0, 0.0]]))
    assert torch.allclose(
        rms_norm(x, torch.tensor([2.0, 1.0, 1.0, 1.0]), 6.25 * 3), torch.tensor([[1.2, 0.8, 0.0, 0.0]])
    )


# KV4


@settings(max_examples=50, deadline=None)
@given(width=st.sampled_from([64, 128]), seed=st.integers(0, 2**31), shift=st.floats(-8, 8))
def test_kv4_error_is_half_a_step(width: int, seed: int, shift: float) -> None:
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed)) + shift
    codes, scale, zero = quantize_kv(x)
    assert codes.dtype == torch.uint8 and codes.max() <= 15
    assert scale.dtype == zero.dtype == torch.float16
    # float16 keeps 11 bits: scale and zero are each off by at most 2**-11 of their size.
    slack = 15 * scale.float() * 2.0**-11 + zero.float().abs() * 2.0**-11
    error = (dequantize_kv(codes, scale, zero) - x).abs()
    assert (error <= (0.5001 * scale.float() + slack)[..., None]).all()


def test_kv4_keeps_a_constant_exactly() -> None:
    x = torch.full((1, 64), 0.3125)
    codes, scale, zero = quantize_kv(x)
    assert not codes.any() and not scale.any()
    assert torch.equal(dequantize_kv(codes, scale, zero), x)
