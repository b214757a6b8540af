"""A decode step's indices for a GPU, in Triton: one small launch instead of the two dozen that PyTorch would take.

What they compute is what `kv4.KVBatch` defines for one new token per sequence, and `rope.rope_tables` looked up in a
table of all positions.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from w4a4.kernels.kv4 import KVPageLayout

TILE = 16
"""Tokens of one tile of the decode kernel."""


@dataclass(frozen=True)
class DecodeIndices:
    """slots, sink_slots: int64 [B] as `KVBatch.slots` and `KVBatch.sink_slots`; cos, sin: float32 [B, D / 2].

    tile_ends: int32 [B], running sum of the tiles of 16 tokens of each context, at least one each.
    """

    slots: Tensor
    sink_slots: Tensor | None
    cos: Tensor
    sin: Tensor
    tile_ends: Tensor


@triton.jit
def _indices(
    lengths,  # int32 [B]
    tables,  # int32 [B, width]
    sink_pages,  # int32 [B]
    slots,  # int64 [B]
    sink_slots,  # int64 [B]
    tile_ends,  # int32 [B]
    cos_table,  # float32 [positions, HALF]
    sin_table,
    cos,  # float32 [B, HALF]
    sin,
    count,
    width,
    PAGE: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs 0 to B - 1 look up a sequence's angles, program B computes the places of all."""
    program = tl.program_id(0)
    if program < count:
        channels = tl.arange(0, HALF)
        row = tl.maximum(tl.load(lengths + program) - 1, 0).to(tl.int64) * HALF
        tl.store(cos + program * HALF + channels, tl.load(cos_table + row + channels))
        tl.store(sin + program * HALF + channels, tl.load(sin_table + row + channels))
    else:
        sequence = tl.arange(0, BLOCK)
        keep = sequence < count
        length = tl.load(lengths + sequence, mask=keep, other=0)
        position = tl.maximum(length - 1, 0)
        is_used = length > 0
        entry = tables + sequence.to(tl.int64) * width + position // PAGE
        page = tl.load(entry, mask=keep & is_used, other=0).to(tl.int64)
        tl.store(slots + sequence, tl.where(is_used, page * PAGE + position % PAGE, -1), mask=keep)
        if SINKS > 0:
            sink = tl.load(sink_pages + sequence, mask=keep, other=0).to(tl.int64) * SINKS + position
            tl.store(sink_slots + sequence, tl.where(is_used & (position < SINKS), sink, -1), mask=keep)
        tiles = tl.where(keep, tl.maximum((length + TILE - 1) // TILE, 1), 0)
        tl.store(tile_ends + sequence, tl.cumsum(tiles, 0), mask=keep)


def decode_indices(
    context_lengths: Tensor,
    block_tables: Tensor,
    sink_pages: Tensor | None,
    rotary: tuple[Tensor, Tensor],
    layout: KVPageLayout,
) -> DecodeIndices:
    """For B sequences with one new token each; a context length of 0 marks an empty slot.

    Args:
        context_lengths: int32 [B]. block_tables: int32 [B, W], contiguous. sink_pages: int32 [B] or None.
        rotary: cos and sin, float32 [positions, D / 2], D a power of two.
    """
    count, width = block_tables.shape
    device = context_lengths.device
    slots = torch.empty(count, dtype=torch.int64, device=device)
    sinks = None if sink_pages is None else torch.empty_like(slots)
    tile_ends = torch.empty(count, dtype=torch.int32, device=device)
    cos, sin = (torch.empty(count, layout.head_dim // 2, device=device) for _ in range(2))
    _indices[(count + 1,)](
        context_lengths, block_tables, slots if sink_pages is None else sink_pages, slots,
        slots if sinks is None else sinks, tile_ends, *rotary, cos, sin, count, width, PAGE=layout.page_size,
        SINKS=0 if sinks is None else layout.num_sinks, TILE=TILE, HALF=layout.head_dim // 2,
        BLOCK=max(32, triton.next_power_of_2(count)),
    )  # fmt: skip
    return DecodeIndices(slots, sinks, cos, sin, tile_ends)
