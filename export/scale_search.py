"""The search for int4 row scales on a GPU, in Triton: one launch instead of seven for every factor of the grid.

A program takes one row through all factors. The arithmetic is that of `rounding._search`; only the order of
the sum over a row differs.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _search(
    weight,  # f32 [rows, columns], rows `stride` apart
    widest,  # f32 [rows]
    importance,  # f32 [columns]
    factors,  # f32 [num_factors]
    best,  # f32 [rows]
    stride,
    columns,
    num_factors,
    low,
    high,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.load(widest + row)
    best_scale = largest
    best_error = largest * 0.0 + float("inf")
    for index in range(num_factors):
        scale = largest * tl.load(factors + index)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            keep = start + lane < columns
            value = tl.load(weight + row * stride + start + lane, mask=keep, other=0.0)
            code = tl.minimum(tl.maximum(tl.math.div_rn(value, scale + tl.zeros_like(value)), low), high)
            code = (code + 12582912.0) - 12582912.0  # 1.5 * 2**23: to nearest, ties to even
            error = code * scale - value
            total += error * error * tl.load(importance + start + lane, mask=keep, other=0.0)
        error = tl.sum(total, 0)
        best_scale = tl.where(error < best_error, scale, best_scale)
        best_error = tl.minimum(error, best_error)
    tl.store(best + row, best_scale)


def search_row_scales(
    weight: Tensor, widest: Tensor, importance: Tensor, factors: Tensor, code_range: tuple[int, int]
) -> Tensor:
    """The scale `widest` [N] times that of `factors` [F] with the least sum_k importance_k (w_k - round(w_k))², [N].

    weight: f32 [N, K] on a GPU, unit stride along K; importance: f32 [K].
    """
    rows, columns = weight.shape
    best = torch.empty_like(widest)
    low, high = map(float, code_range)
    _search[(rows,)](
        weight, widest, importance, factors.to(weight.device), best, weight.stride(0), columns, len(factors), low, high,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return best
