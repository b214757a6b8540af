"""The sequential part of GPTQ on a GPU, in Triton: a block of columns rounded in one launch instead of nine a column.

Rows do not depend on each other, so a warp takes 8 of them through the block's columns, keeping their errors in
registers. The arithmetic is that of `gptq._block_rounder`; only the order of the sums over a block's errors differs.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
_ROWS = 8


@triton.jit(do_not_specialize=["columns"])
def _round_columns(
    remaining,  # f32 [columns, rows]
    rounded,  # f32 [columns, rows]
    errors,  # f32 [columns, rows]
    back,  # f32 [columns, columns]: back[c, e] takes the error of column e to column c
    scales,  # f32 [num_scales, rows]
    scale_index,  # int32 [columns]
    low,  # f32 [columns]
    high,  # f32 [columns]; 0: a 16-bit column
    rows,
    columns,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    keep = row < rows
    made = tl.zeros((BLOCK, ROWS), tl.float32)
    for column in range(columns):
        feedback = tl.load(back + column * columns + lane, mask=lane < column, other=0.0)
        place = column * rows + row
        current = tl.load(remaining + place, mask=keep, other=0.0) - tl.sum(made * feedback[:, None], 0)
        largest = tl.load(high + column)
        if largest == 0.0:
            code = current.to(tl.bfloat16).to(tl.float32)
            value = code
        else:
            scale = tl.load(scales + tl.load(scale_index + column) * rows + row, mask=keep, other=1.0)
            code = tl.minimum(tl.maximum(tl.math.div_rn(current, scale), tl.load(low + column)), largest)
            code = (code + 12582912.0) - 12582912.0  # 1.5 * 2**23: to nearest, ties to even
            value = code * scale
        error = tl.math.div_rn(current - value, tl.load(back + column * columns + column) + tl.zeros_like(current))
        made = tl.where(lane[:, None] == column, error[None, :], made)
        tl.store(rounded + place, code, mask=keep)
        tl.store(errors + place, error, mask=keep)


def round_columns(
    remaining: Tensor, rounded: Tensor, errors: Tensor, factor: Tensor, scales: Tensor, grid: tuple[Tensor, ...]
) -> None:
    """Round a block of columns, one row of `remaining` each, in order; all tensors float32 on one GPU and contiguous.

    Args:
        remaining: [C, N], C <= 128, what is left of the columns when the block begins.
        rounded, errors: [C, N], written: codes (values of 16-bit columns), and the errors over `factor`'s diagonal.
        factor: [C, C], the block's part of the upper triangular factor.
        scales: [S, N].
        grid: of every column the index of its scale int32 [C], its lowest and its highest code f32 [C]; the highest
            is 0 where the column stays in 16 bits.
    """
    columns, rows = remaining.shape
    scale_index, low, high = grid
    _round_columns[(triton.cdiv(rows, _ROWS),)](
        remaining, rounded, errors, factor.T.contiguous(), scales, scale_index, low, high, rows, columns,
        BLOCK=BLOCK, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
