"""The largest logit of each row and its token on a GPU, in Triton: two launches that use the whole device.

PyTorch gives a row to one thread block, which takes 28 us for one row of a vocabulary of 128,256.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _part_maxima(
    logits,  # float32 [rows, vocab]
    values,  # float32 [rows, parts]
    tokens,  # int32 [rows, parts]
    vocab,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + columns, mask=columns < vocab, other=-float("inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0)
    best, index = tl.max(x, 0, return_indices=True)  # of equal ones the first
    at = row * tl.num_programs(1) + part
    tl.store(values + at, tl.where(has_nan > 0, float("nan"), best))
    tl.store(tokens + at, part * BLOCK + index)


@triton.jit
def _row_maxima(
    values,  # float32 [rows, parts]
    tokens,  # int32 [rows, parts]
    best_values,  # float32 [rows]
    best_tokens,  # [rows]
    lengths,  # int32 [rows], one is added to each where ADVANCES
    parts,
    PARTS: tl.constexpr,
    ADVANCES: tl.constexpr,
):
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    x = tl.load(values + row * parts + part, mask=part < parts, other=-float("inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0)
    best, index = tl.max(x, 0, return_indices=True)
    token = tl.load(tokens + row * parts + index)
    tl.store(best_tokens + row, token.to(best_tokens.dtype.element_ty))
    if ADVANCES:
        tl.store(lengths + row, tl.load(lengths + row) + 1)
    else:
        tl.store(best_values + row, tl.where(has_nan > 0, float("nan"), best))


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `logits.max(dim=-1)` of contiguous float32 [R, V]: values [R], NaN where a row has one, and tokens int64 [R].

    Of equal logits the first token is taken. The token of a row with NaN is any.
    """
    rows = logits.shape[0]
    values = torch.empty(rows, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _reduce(logits, values, tokens, None)
    return values, tokens


def advance_greedily(logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Write the most probable token of each row of float32 [R, V] to `tokens` [R], and add 1 to `lengths` int32 [R]."""
    _reduce(logits, logits, tokens, lengths)


def _reduce(logits: Tensor, values: Tensor, tokens: Tensor, lengths: Tensor | None) -> None:
    rows, vocab = logits.shape
    block = 1024 if rows <= 4 else 4096
    parts = triton.cdiv(vocab, block)
    part_values = torch.empty(rows, parts, device=logits.device)
    part_tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _part_maxima[(rows, parts)](logits, part_values, part_tokens, vocab, BLOCK=block)
    _row_maxima[(rows,)](
        part_values, part_tokens, values, tokens, part_tokens if lengths is None else lengths, parts,
        PARTS=triton.next_power_of_2(parts), ADVANCES=lengths is not None, num_warps=4,
    )  # fmt: skip
