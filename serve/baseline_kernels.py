"""Element-wise kernels of the baselines, in Triton: fused as anybody would fuse them, so that the baselines are fair.
The last norm of every model is one of them.

Rows are tokens. Where `QUANTIZES`, the result is float8 e4m3 with one scale per row (absmax / 448), what
`torch._scaled_mm` takes, which wants a multiple of 16 rows: those beyond the tokens are there and hold nothing. Else
the result is bf16. Arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_MULTIPLE = 16  # of the rows of a float8 product: cuBLASLt refuses others


@triton.jit  # type: ignore[untyped-decorator]
def _store_row(values, out, scales, row, width, columns, keep, QUANTIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    if QUANTIZES:
        scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / 448.0
        tl.store(scales + row, scale)
        values = values / scale
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=keep)


@triton.jit  # type: ignore[untyped-decorator]
def _rmsnorm(  # type: ignore[no-untyped-def]
    x, residual, weight, hidden, out, scales, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, QUANTIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    keep = columns < width
    values = tl.load(x + row * width + columns, mask=keep, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * width + columns, mask=keep, other=0.0).to(tl.float32)
        rounded = values.to(hidden.dtype.element_ty)
        tl.store(hidden + row * width + columns, rounded, mask=keep)
        values = rounded.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    if HAS_WEIGHT:
        values *= tl.load(weight + columns, mask=keep, other=0.0).to(tl.float32)
    _store_row(values, out, scales, row, width, columns, keep, QUANTIZES)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_row(  # type: ignore[no-untyped-def]
    gate_up, out, scales, width, QUANTIZES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=keep, other=0.0).to(tl.float32)
    _store_row(gate * tl.sigmoid(gate) * up, out, scales, row, width, columns, keep, QUANTIZES)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_row(x, out, scales, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    keep = columns < width
    values = tl.load(x + row * width + columns, mask=keep, other=0.0).to(tl.float32)
    _store_row(values, out, scales, row, width, columns, keep, True)


def rmsnorm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, is_fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x bf16 [T, K] + residual, RMSNorm: (sum bf16 [T, K], result, scales).

    Result: bf16 [T, K], or float8 [T rounded up to 16, K] with scales f32 of as many rows.
    """
    tokens, width = x.shape
    hidden = x if residual is None else torch.empty_like(x)
    out, scales = _outputs(tokens, width, x.device, is_fp8)
    block = triton.next_power_of_2(width)
    _rmsnorm[(tokens,)](
        x, residual, weight, hidden, out, scales, width, eps, residual is not None, weight is not None, is_fp8, block,
        num_warps=_warps(block),
    )  # fmt: skip
    return hidden, out, scales


def silu_mul(gate_up: Tensor, is_fp8: bool) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of bf16 [T, 2 K]: (result, scales) as of `rmsnorm`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, scales = _outputs(tokens, width, gate_up.device, is_fp8)
    block = triton.next_power_of_2(width) if is_fp8 else 1024
    _silu_mul_row[(tokens, triton.cdiv(width, block))](
        gate_up, out, scales, width, is_fp8, block, num_warps=_warps(block)
    )
    return out, scales


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [T, K] to float8 and scales, rows rounded up to 16."""
    tokens, width = x.shape
    out, scales = _outputs(tokens, width, x.device, True)
    block = triton.next_power_of_2(width)
    _quantize_row[(tokens,)](x, out, scales, width, block, num_warps=_warps(block))
    return out, scales


def _outputs(tokens: int, width: int, device: torch.device, is_fp8: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    rows = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE if is_fp8 else tokens
    scales = torch.empty(rows if is_fp8 else 0, 1, device=device)
    return torch.empty(rows, width, dtype=dtype, device=device), scales


def _warps(block: int) -> int:
    return max(1, min(32, block // 512))
