"""Decode attention over 16-bit pages for a GPU: split-KV in Triton, with a second small launch that merges the splits.

Serves `--kv 16`, and is the baseline that KV4 is measured against, so it has to be a good one: tensor-core products
with the query heads of a kv-head packed into one operand, two tiles of K and V in flight. Reads the pages of
`kv4.KVPageLayout(bits=16)`; the law is kv4.py. Lengths are read on the device, so a CUDA graph may be replayed.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Tokens of a tile."""


@triton.jit
def _attend_split(
    q,  # [rows, HEADS, DIM]
    pages,  # [num_pages, KV_HEADS, 2, PAGE, DIM]
    tables,  # int32 [B, max_pages]
    lengths,  # int32 [B]
    partial,  # float32 [B, KV_HEADS, splits, GROUP, DIM]
    stats,  # float32 [B, KV_HEADS, splits, GROUP, 2]
    scale,
    window,
    max_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(0)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)
    first_tile, end_tile = first // BLOCK, tl.cdiv(length, BLOCK)
    share = tl.cdiv(end_tile - first_tile, splits)
    start = first_tile + split * share
    rows, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    query_offsets = (sequence * KV_HEADS + head) * GROUP * DIM + rows[:, None] * DIM + channels[None, :]
    query = tl.load(q + query_offsets, mask=rows[:, None] < GROUP, other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for tile in range(start, tl.minimum(start + share, end_tile)):
        tokens = tile * BLOCK + tl.arange(0, BLOCK)
        if PAGE >= BLOCK:
            page = tl.load(tables + sequence * max_pages + tile * BLOCK // PAGE).to(tl.int64)
        else:
            page = tl.load(tables + sequence * max_pages + tokens // PAGE, mask=tokens < length, other=0).to(tl.int64)
        base = (page * KV_HEADS + head) * (2 * PAGE * DIM) + (tokens % PAGE) * DIM
        key = tl.load(pages + base[None, :] + channels[:, None])
        value_offsets = (base + PAGE * DIM)[:, None] + channels[None, :]  # a page's unused tokens may hold NaN
        value = tl.load(pages + value_offsets, mask=(tokens < length)[:, None], other=0.0)
        visible = (tokens >= first) & (tokens < length)
        scores = tl.where(visible[None, :], tl.dot(query, key) * scale, -1e38)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        probabilities = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(probabilities, 1)
        acc = tl.dot(probabilities.to(value.dtype), value, acc * shrink[:, None])
        top = new_top
    item = ((sequence * KV_HEADS + head) * splits + split) * GROUP + rows
    tl.store(partial + item[:, None] * DIM + channels[None, :], acc, mask=rows[:, None] < GROUP)
    tl.store(stats + item * 2, top, mask=rows < GROUP)
    tl.store(stats + item * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def _merge_splits(partial, stats, out, splits, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    head, own = tl.program_id(0), tl.program_id(1)  # kv-head of a sequence, query head in it
    parts, channels = tl.arange(0, SPLITS), tl.arange(0, DIM)
    item = (head * splits + parts) * GROUP + own
    is_part = parts < splits
    top = tl.load(stats + item * 2, mask=is_part, other=-1e30)
    total = tl.load(stats + item * 2 + 1, mask=is_part, other=0.0)
    shrink = tl.exp2(top - tl.max(top, 0))
    values = tl.load(partial + item[:, None] * DIM + channels[None, :], mask=is_part[:, None], other=0.0)
    total = tl.sum(total * shrink, 0)
    result = tl.sum(values * shrink[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (head * GROUP + own) * DIM + channels, result.to(out.dtype.element_ty))


def splits_for(kv_heads: int, multiprocessors: int) -> int:
    """CTAs a kv-head (of one sequence): about four for each multiprocessor in all, a power of two up to 64."""
    return min(64, triton.next_power_of_2(max(1, 4 * multiprocessors // kv_heads)))


def decode_16(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    num_splits: int,
) -> Tensor:
    """Attention of one query row per sequence, q [B, Hq, D], to 16-bit pages [N, Hkv, bytes] of q's dtype.

    num_splits: CTAs that share a kv-head of a sequence. Enough to fill the device: see `splits_for`.
    """
    num_sequences, num_heads, dim = q.shape
    num_kv_heads = pages.shape[1]
    group = num_heads // num_kv_heads
    partial = torch.empty(num_sequences, num_kv_heads, num_splits, group, dim, device=q.device)
    stats = torch.empty(num_sequences, num_kv_heads, num_splits, group, 2, device=q.device)
    out = torch.empty_like(q)
    _attend_split[(num_splits, num_kv_heads, num_sequences)](
        q, pages.view(q.dtype), block_tables, context_lengths, partial, stats, scale * 1.4426950408889634,
        window or 1 << 30, block_tables.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, PAGE=page_size,
        BLOCK=BLOCK, num_warps=4, num_stages=3 if dim <= 128 else 2,
    )  # fmt: skip
    _merge_splits[(num_sequences * num_kv_heads, group)](
        partial, stats, out, num_splits, GROUP=group, DIM=dim, SPLITS=triton.next_power_of_2(num_splits)
    )
    return out
