"""The CPU path: the reference's results, fast enough to generate text with a small model.

Integer products run through `torch._int_mm` (oneDNN int8 with int32 accumulators) where it is exact on this processor,
and through the reference's float32 chunks where it is not. A token's result never depends on which other tokens are
in the call: rows are processed in pieces too small for PyTorch to split between threads, and float GEMMs always run
in tiles of one fixed height, so that no reduction changes its order with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.reference import (
    QuantizedActivation,
    dequantize_weight,
    integer_matmul,
    rms_norm,
)
from w4a4.kernels.reference import quantize_activation as quantize_reference

# PyTorch's intra-op grain: an elementwise operation or reduction over fewer elements runs on one thread.
_GRAIN = 32768
# Rows of a float GEMM. 16 costs a single row 0.6 ms instead of 0.13 ms at 3072 x 576 and gives 27 kRow/s in prefill,
# 60 % of an untiled GEMM (2 cores of an AMD EPYC 9004).
_FLOAT_TILE = 16
_HEAD_TILE = 4

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUT_DTYPE = torch.float32


def path(layout: LinearLayout) -> str:
    """The name of what runs."""
    return "reference-cpu"


def code_columns(layout: LinearLayout) -> int:
    """Columns of a quantised activation's codes: the integer segments side by side, not padded."""
    return sum(segment.width for segment in layout.segments if segment.act_bits < 16)


@cache
def has_exact_int_mm() -> bool:
    """Whether `torch._int_mm` is exact here. Without VNNI oneDNN may saturate 16-bit sums of int8 x int8 products."""
    for rows in (1, 24):
        codes = torch.full((rows, 512), 127, dtype=torch.int8)
        weight = torch.full((64, 512), 127, dtype=torch.int8)
        weight[1::2] = -128
        expected = codes.to(torch.int64) @ weight.to(torch.int64).T
        if not torch.equal(torch._int_mm(codes, weight.T).to(torch.int64), expected):
            return False
    return True


def prepare_weights(
    layout: LinearLayout,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    bias: Tensor | None,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Weights as `linear` wants them, one [N, width] per segment, and their row sums.

    Integer segments stay int8 (float32 where `torch._int_mm` is not exact); segments whose activations stay in 16 bit
    are dequantised to float32. Row sums, f32 [N, integer segments], are made for asymmetric activations only. The bias
    is not looked at.
    """
    held, sums = [], []
    for (segment, column, scale_index), weight in zip(layout.placed(), weights, strict=True):
        if segment.act_bits == 16:
            held.append(
                dequantize_weight(weight.to(device), weight_scales, layout, column, scale_index, segment.weight_bits)
            )
        else:
            codes = weight.to(device).contiguous()
            held.append(codes if has_exact_int_mm() else codes.float())
            sums.append(codes.sum(1, dtype=torch.int32).float())
    row_sums = torch.stack(sums, 1) if sums and not layout.symmetric else None
    return tuple(held), row_sums


def quantize(x: Tensor, layout: LinearLayout, perm: Tensor | None) -> QuantizedActivation:
    """`reference.quantize_activation` of x [T, K] in float32, piece by piece."""
    return _by_rows(x, x.shape[1], lambda rows: quantize_reference(rows.float(), layout, perm))


def rmsnorm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, layout: LinearLayout, perm: Tensor | None
) -> tuple[Tensor, QuantizedActivation]:
    """x [T, K] + residual in x's dtype, and the `quantize` of its RMSNorm; float32 between."""
    hidden = x if residual is None else x + residual
    gain = None if weight is None else weight.float()

    def piece(rows: Tensor) -> QuantizedActivation:
        return quantize_reference(rms_norm(rows.float(), gain, eps), layout, perm)

    return hidden, _by_rows(hidden, hidden.shape[1], piece)


def silu_mul_quantize(gate_up: Tensor, layout: LinearLayout, perm: Tensor | None) -> QuantizedActivation:
    """The `quantize` of silu(gate) * up, gate_up [T, 2K] = [gate | up]; float32 between."""
    width = gate_up.shape[1] // 2

    def piece(rows: Tensor) -> QuantizedActivation:
        gate, up = torch.split(rows.float(), width, dim=1)
        return quantize_reference(torch.nn.functional.silu(gate) * up, layout, perm)

    return _by_rows(gate_up, width, piece)


def _by_rows(x: Tensor, width: int, piece: Callable[[Tensor], QuantizedActivation]) -> QuantizedActivation:
    rows = max(1, (_GRAIN - 1) // width)
    if x.shape[0] <= rows:
        return piece(x)
    parts = [piece(part) for part in torch.split(x, rows)]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return QuantizedActivation(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=joined([part.zeros for part in parts]),
        unquantized=joined([part.unquantized for part in parts]),
    )


def linear(
    activation: QuantizedActivation,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    row_sums: Tensor | None,
    bias: Tensor | None,
    layout: LinearLayout,
) -> Tensor:
    """`reference.w4ax_gemm` with weights from `prepare_weights`: float32 [T, N].

    Equal to the reference bit for bit where every activation is quantised; 16-bit segments differ by the order of
    their float32 sums.
    """
    tokens = activation.scales.shape[0]
    y: Tensor | None = None
    code_start = float_start = index = 0
    for (segment, _, scale_index), weight in zip(layout.placed(), weights, strict=True):
        if segment.act_bits == 16:
            assert activation.unquantized is not None
            part = activation.unquantized[:, float_start : float_start + segment.width]
            term = tiled_matmul(part.float(), weight)
            float_start += segment.width
        else:
            codes = activation.codes[:, code_start : code_start + segment.width]
            product = _integer_product(codes, weight)
            if activation.zeros is not None:
                assert row_sums is not None
                product = product.float() - activation.zeros[:, index, None] * row_sums[:, index]
            term = torch.outer(activation.scales[:, index], weight_scales[:, scale_index]).mul_(product)
            code_start += segment.width
            index += 1
        y = term if y is None else y.add_(term)
    assert y is not None and y.shape == (tokens, layout.out_features)
    return y if bias is None else y.add_(bias)


def _integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype != torch.int8:
        return integer_matmul(codes, weight)
    if not codes.shape[0]:
        return torch.zeros(0, weight.shape[0], dtype=torch.int32)
    return torch._int_mm(codes.contiguous(), weight.T)


def head_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """As `tiled_matmul` for a weight with many more rows than columns, four rows of x at a time: [T, N].

    A single row against 49,152 x 576 takes 9 ms on one core, where a tile of 16 rows takes 25; 2,048 rows take 1.4
    times as long (AMD EPYC 9004).
    """
    tokens = x.shape[0]
    y = torch.empty(tokens, weight.shape[0])
    tile = torch.zeros(_HEAD_TILE, x.shape[1])
    for start in range(0, tokens, _HEAD_TILE):
        count = min(_HEAD_TILE, tokens - start)
        tile[:count] = x[start : start + count]
        y[start : start + count] = torch.mm(weight, tile.T).T[:count]
    return y


def tiled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight [N, K]ᵀ in float32, always as GEMMs of 16 rows: a row's result is the same in any batch."""
    tokens = x.shape[0]
    tiles = -(-tokens // _FLOAT_TILE)
    padded = torch.zeros(tiles * _FLOAT_TILE, x.shape[1])
    padded[:tokens] = x
    y = torch.empty(tiles * _FLOAT_TILE, weight.shape[0])
    for start in range(0, tokens, _FLOAT_TILE):
        torch.mm(padded[start : start + _FLOAT_TILE], weight.T, out=y[start : start + _FLOAT_TILE])
    return y[:tokens]
