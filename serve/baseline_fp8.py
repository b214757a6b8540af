"""The fp8 baseline's products of a few tokens, in Triton: cuBLASLt's row-wise fp8 is no faster than bf16 there.

A thread block reads its rows of the weights once, several tiles on their way; where rows are few, blocks share them
along K, and whoever of them arrives last adds the parts up, in their order. Sums are float32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """rows: of the weights, of one block; columns: at a time; parts: blocks that share rows along K."""

    rows: int
    columns: int
    warps: int
    stages: int
    parts: int


@triton.jit
def _product(
    x,  # float8 [T rounded up, K]
    x_scales,  # float32 [T rounded up]
    weight,  # float8 [N, K]
    weight_scales,  # float32 [N]
    bias,  # bf16 [N]
    out,  # bf16 [T, N]
    partial,  # float32 [PARTS, TOKENS, N]
    arrived,  # int32 [blocks of rows], zero before and after
    tokens,
    rows,
    width,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    block, part = tl.program_id(0), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    share = tl.cdiv(width, COLUMNS * PARTS) * COLUMNS
    start = part * share
    is_token = token < tokens
    x_at = x + token[:, None] * width + start + column[None, :]
    weight_at = weight + row[None, :].to(tl.int64) * width + start + column[:, None]
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for _ in range(0, tl.cdiv(tl.minimum(share, width - start), COLUMNS)):
        values = tl.load(x_at, mask=is_token[:, None], other=0.0)
        total = tl.dot(values, tl.load(weight_at), total)
        x_at += COLUMNS
        weight_at += COLUMNS
    is_last = True
    if PARTS > 1:
        slot = partial + token[:, None] * rows + row[None, :]
        tl.store(slot + part.to(tl.int64) * TOKENS * rows, total, mask=is_token[:, None])
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            total = tl.zeros([TOKENS, ROWS], tl.float32)
            for i in tl.static_range(PARTS):
                total += tl.load(slot + i * TOKENS * rows, mask=is_token[:, None], other=0.0, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    if is_last:
        scale = tl.load(x_scales + token, mask=is_token, other=0.0)
        total = total * scale[:, None] * tl.load(weight_scales + row)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + row).to(tl.float32)[None, :]
        tl.store(out + token[:, None] * rows + row[None, :], total.to(out.dtype.element_ty), mask=is_token[:, None])


def product(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, tokens: int, tile: Tile
) -> Tensor:  # fmt: skip
    """What `torch._scaled_mm` gives for x float8 [T rounded up to 16, K] with scales f32 [.., 1] and weight float8
    [N, K] with scales f32 [1, N], N and K multiples of the tile's: bf16 [T, N].
    """
    rows, width = weight.shape
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    held = max(16, triton.next_power_of_2(tokens))
    partial, arrived = _workspace(x.device, tile.parts * held * rows if tile.parts > 1 else 1)
    _product[(rows // tile.rows, tile.parts)](
        x, x_scales, weight, weight_scales, weight_scales if bias is None else bias, out, partial, arrived, tokens,
        rows, width, HAS_BIAS=bias is not None, TOKENS=held, ROWS=tile.rows, COLUMNS=tile.columns, PARTS=tile.parts,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def tile_for(rows: int, tokens: int) -> Tile | None:
    """The fastest tile on an H200 at the shapes of Llama-3-8B; None where `torch._scaled_mm` is faster."""
    if tokens <= 32:
        return Tile(32, 512, 4, 3, 1) if rows > 16384 else Tile(32, 256, 4, 5, 2)
    if tokens > 64 or rows > 16384:
        return None
    return Tile(64, 256, 4, 4, 1) if rows >= 6144 else Tile(32, 256, 4, 5, 1)


@cache
def _workspace(device: torch.device, words: int) -> tuple[Tensor, Tensor]:
    """Parts of sums, and how many of a block of rows have arrived."""
    return torch.empty(words, device=device), torch.zeros(4096, dtype=torch.int32, device=device)
