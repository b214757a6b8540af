"""The KV cache on Hopper: which kernel writes and attends to pages, compiled, loaded and launched.

Decode over 4-bit pages is `kv4_decode_sm90.py`, over 16-bit pages `kv16_sm90.py`; writing is `kv4_write_sm90.py`.
A chunk of a prompt reads its sequence's pages into a contiguous workspace and attends there through PyTorch's SDPA:
its own tokens in quantised form too, so that the law of kv4.py (an output depends on its sequence alone) holds up to
the rounding of SDPA. Everything a decode launch needs is computed on the device, so a CUDA graph of a step may be
replayed after its block tables and lengths were overwritten in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from w4a4.kernels.compile_cache import Kernel, load
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, sink_view
from w4a4.kernels.prompt_attention import attend_causally, attend_planned, is_planned, rounded_length

ARCH = "sm_90a"
LOG2_E = 1.4426950408889634
MAX_PARTS = 32
"""CTAs that share one kv-head of one sequence on average, at most: merging their parts costs time."""
MAX_LONG_HEADS, MIN_LONG_TOKENS = 64, 8192
"""Kv-heads of a step at most, and room for tokens of each at least, where blocks of eight warps are the faster ones."""
MAX_WORKSPACE_TOKENS = 1 << 16
"""Tokens of equal prompts that are read back and attended to in one launch, at most."""
_MAX_COUNTERS = 1 << 16
_TILE = 16
_UNLIMITED = 1 << 30
_FLOATS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DecodeVariant:
    """What is fixed when a decode kernel is compiled.

    group_size: query heads of a kv-head, 1 to 16.
    warps: of a thread block, 4 or 8. With 8 a kv-head has half as many parts to merge, but all of a block's warps wait
    for each other at its end.
    """

    head_dim: int
    group_size: int
    page_size: int
    num_sinks: int
    dtype: torch.dtype
    sink_dtype: torch.dtype
    warps: int = 4
    overlap_launch: bool = True  # start while the previous kernel drains (programmatic dependent launch)

    @property
    def name(self) -> str:
        types = "".join("b" if dtype == torch.bfloat16 else "h" for dtype in (self.dtype, self.sink_dtype))
        sizes = f"d{self.head_dim}-g{self.group_size}-p{self.page_size}-s{self.num_sinks}-w{self.warps}"
        return f"kv4-decode-{sizes}-{types}{'-p' if self.overlap_launch else ''}"

    @property
    def blocks_per_multiprocessor(self) -> int:
        return (16 if self.is_small else 8) // self.warps

    @property
    def is_small(self) -> bool:
        """Whether 16 warps' shared memory fits in a multiprocessor."""
        return self.head_dim <= 128 and self.group_size <= 8


@dataclass(frozen=True)
class WriteVariant:
    """What is fixed when a write kernel is compiled."""

    head_dim: int
    page_size: int
    bits: int
    num_sinks: int
    dtype: torch.dtype
    page_dtype: torch.dtype
    has_norm: bool
    has_mean: bool
    use_hadamard: bool
    overlap_launch: bool = True

    @property
    def name(self) -> str:
        types = "".join("b" if dtype == torch.bfloat16 else "h" for dtype in (self.dtype, self.page_dtype))
        flags = ("n" if self.has_norm else "") + ("m" if self.has_mean else "") + ("h" if self.use_hadamard else "")
        flags += "p" if self.overlap_launch else ""
        sizes = f"d{self.head_dim}-p{self.page_size}-b{self.bits}-s{self.num_sinks}"
        return f"kv4-write-{sizes}-{types}{'-' if flags else ''}{flags}"

    @property
    def blocks_per_multiprocessor(self) -> int:
        return 6


def kernel_of(variant: DecodeVariant | WriteVariant) -> Kernel:
    """A variant as something to compile and cache."""
    here = Path(__file__).parent
    if isinstance(variant, DecodeVariant):
        return Kernel(variant.name, (here / "kv4_decode_sm90.py", here / "ptx_sm90.py"), lambda: _build_decode(variant))
    return Kernel(variant.name, (here / "kv4_write_sm90.py", here / "ptx_sm90.py"), lambda: _build_write(variant))


def kernels_of(
    layout: KVPageLayout, num_heads: int, dtype: torch.dtype, has_norm: bool, has_mean: bool, use_hadamard: bool
) -> dict[str, Kernel]:
    """Every kernel of this file that a model with such a cache launches, by name."""
    variants: list[DecodeVariant | WriteVariant] = [write_variant(layout, dtype, has_norm, has_mean, use_hadamard)]
    if layout.bits == 4:
        variants.extend(decode_variant(layout, num_heads, dtype, is_long) for is_long in (False, True))
    return {variant.name: kernel_of(variant) for variant in variants}


def decode_variant(layout: KVPageLayout, num_heads: int, dtype: torch.dtype, is_long: bool = False) -> DecodeVariant:
    """is_long: whether few sequences with room for long contexts are to be attended to, see `_is_long`."""
    group_size = num_heads // layout.num_kv_heads
    if dtype not in _FLOATS or not 1 <= group_size <= 16:
        raise ValueError(
            f"decode kernels take bf16 or fp16 and 1 to 16 query heads a kv-head, got {dtype}, {group_size}"
        )
    variant = DecodeVariant(layout.head_dim, group_size, layout.page_size, layout.num_sinks, dtype, layout.dtype)
    return replace(variant, warps=8) if is_long and variant.is_small else variant


def _is_long(batch: KVBatch, layout: KVPageLayout) -> bool:
    """Whether kv-heads are few and, as far as the tables' width tells, long: many blocks then share each."""
    sequences, columns = batch.block_tables.shape
    return sequences * layout.num_kv_heads <= MAX_LONG_HEADS and columns * layout.page_size >= MIN_LONG_TOKENS


def write_variant(
    layout: KVPageLayout, dtype: torch.dtype, has_norm: bool, has_mean: bool, use_hadamard: bool
) -> WriteVariant:
    if dtype not in _FLOATS:
        raise ValueError(f"write kernels take bf16 or fp16, got {dtype}")
    return WriteVariant(
        layout.head_dim, layout.page_size, layout.bits, layout.num_sinks, dtype, layout.dtype,
        has_norm, has_mean, use_hadamard,
    )  # fmt: skip


def _fake(dtype: Any, *shape: Any, align: int = 16) -> Any:
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(range(len(shape) - 1, -1, -1))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _build_decode(variant: DecodeVariant) -> Any:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float16, Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_stream

    from w4a4.kernels.kv4_decode_sm90 import Kv4Decode

    is_bfloat16 = variant.dtype == torch.bfloat16
    kernel = Kv4Decode(
        variant.head_dim, variant.group_size, variant.page_size, variant.num_sinks, is_bfloat16,
        variant.sink_dtype == torch.bfloat16, variant.warps, variant.blocks_per_multiprocessor, variant.overlap_launch,
    )  # fmt: skip
    rows, sequences, heads, kv_heads, pages, columns, slots, counters = (cute.sym_int() for _ in range(8))
    query = _fake(BFloat16 if is_bfloat16 else Float16, rows, heads, variant.head_dim)
    return cute.compile(
        kernel,
        query,
        _fake(Uint8, pages, kv_heads, variant.page_size * (variant.head_dim + 8)),
        _fake(Int32, sequences, columns, align=4),
        _fake(Int32, sequences, align=4),
        _fake(Int32, sequences, align=4),
        _fake(Int32, sequences, align=4),
        _fake(Float32, slots, variant.group_size, variant.head_dim + 4),
        _fake(Int32, counters, align=4),
        query,
        Float32(1.0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def _build_write(variant: WriteVariant) -> Any:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
    from cutlass.cute.runtime import make_fake_stream

    from w4a4.kernels.kv4_write_sm90 import Kv4Write

    is_bfloat16, dim = variant.dtype == torch.bfloat16, variant.head_dim
    kernel = Kv4Write(
        dim, variant.page_size, variant.bits, variant.num_sinks, is_bfloat16, variant.page_dtype == torch.bfloat16,
        variant.has_norm, variant.has_mean, variant.use_hadamard, variant.blocks_per_multiprocessor,
        variant.overlap_launch,
    )  # fmt: skip
    tokens, heads, q_heads, kv_heads, pages, mean_rows = (cute.sym_int() for _ in range(6))
    head_bytes = variant.page_size * (dim + 8 if variant.bits == 4 else 4 * dim)
    dtype = BFloat16 if is_bfloat16 else Float16
    return cute.compile(
        kernel,
        _fake(dtype, tokens, heads, dim),
        _fake(Float32, tokens, dim // 2),
        _fake(Float32, tokens, dim // 2),
        _fake(dtype, dim),
        _fake(dtype, dim),
        _fake(Float32, mean_rows, dim),
        _fake(Int64, tokens, align=8),
        _fake(Int64, tokens, align=8),
        _fake(Uint8, pages, kv_heads, head_bytes),
        _fake(dtype, tokens, q_heads, dim),
        Float32(1.0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


@cache
def _loaded(variant: DecodeVariant | WriteVariant) -> Any:
    return load(kernel_of(variant), ARCH)


@cache
def _workspace(device: torch.device, blocks: int, group_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Parts of kv-heads that CTAs share, and how many have arrived (zero between launches)."""
    parts = torch.empty(2 * blocks, group_size, head_dim + 4, device=device)
    return parts, torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _any_floats(device: torch.device, head_dim: int) -> Tensor:
    """Stands for a mean that a kernel was compiled not to read."""
    return torch.empty(1, head_dim, device=device)


def kv4_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
    layout: KVPageLayout,
    sink_slots: Tensor | None,
    k_mean: Tensor | None,
    use_hadamard: bool,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """`kv4.kv_rope_write` on a Hopper GPU: q [T, Hq, D] in qkv's dtype, k and v into pages of either width."""
    tokens, heads, dim = qkv.shape
    variant = write_variant(layout, qkv.dtype, norms is not None, k_mean is not None, use_hadamard)
    q = torch.empty(tokens, heads - 2 * layout.num_kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        q_gain, k_gain = (qkv[0, 0], qkv[0, 0]) if norms is None else (norm.to(qkv.dtype) for norm in norms)
        _loaded(variant)(
            qkv.contiguous(),
            cos,
            sin,
            q_gain,
            k_gain,
            _any_floats(qkv.device, dim) if k_mean is None else k_mean.float(),
            slots,
            slots if sink_slots is None else sink_slots,
            pages,
            q,
            eps,
            _multiprocessors(qkv.device) * variant.blocks_per_multiprocessor,
        )
    return q


def attention(
    q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None
) -> Tensor:
    """`kv4.kv_attention` on a Hopper GPU. Steps of one query row a sequence never wait for the device."""
    if q.shape[0] == batch.block_tables.shape[0]:
        return _decode(q.contiguous(), pages, batch, layout, scale, window)
    starts, lengths = batch.on_host
    chunks = list(equal_chunks(starts, lengths))
    if chunks == [(0, len(lengths))]:  # nothing but prompts of one shape
        return kv4_prefill(q, pages, batch, 0, lengths[0], layout, scale, window, len(lengths))
    output = torch.zeros_like(q)
    single = [b for b, length in enumerate(lengths) if starts[b + 1] - starts[b] == 1 and length]
    if single:
        rows, decodes = batch.decodes(single)
        output[rows] = _decode(q[rows], pages, decodes, layout, scale, window)
    for first, count in chunks:
        chunk = slice(starts[first], starts[first + count])
        output[chunk] = kv4_prefill(q[chunk], pages, batch, first, lengths[first], layout, scale, window, count)
    return output


def _decode(q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None) -> Tensor:
    if layout.bits == 16:
        from w4a4.kernels.kv16_sm90 import decode_16, splits_for

        splits = splits_for(q.shape[0] * layout.num_kv_heads, _multiprocessors(q.device))
        query = q.to(layout.dtype)
        out = decode_16(
            query, pages, batch.block_tables, batch.context_lengths, layout.page_size, scale, window, splits
        )
        return out.to(q.dtype)
    if layout.num_sinks and batch.sink_pages is None:
        raise ValueError(f"the layout keeps {layout.num_sinks} sinks, so the batch needs sink_pages, got None")
    return kv4_decode(q, pages, batch, layout, scale, window)


def kv4_decode(
    q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None = None
) -> Tensor:
    """Attention of one query row per sequence, q [B, Hq, D] float16 or bfloat16, to its 4-bit pages: [B, Hq, D]."""
    sequences, heads, dim = q.shape
    if sequences * layout.num_kv_heads > _MAX_COUNTERS:
        raise ValueError(f"at most {_MAX_COUNTERS // layout.num_kv_heads} sequences in one launch, got {sequences}")
    variant = decode_variant(layout, heads, q.dtype, _is_long(batch, layout))
    most = _multiprocessors(q.device) * variant.blocks_per_multiprocessor
    parts, counters = _workspace(q.device, most, variant.group_size, dim)
    lengths = batch.context_lengths
    out = torch.empty_like(q)
    _loaded(variant)(
        q,
        pages,
        batch.block_tables,
        lengths,
        _tile_ends(batch, window),
        lengths if batch.sink_pages is None else batch.sink_pages,
        parts,
        counters,
        out,
        scale * LOG2_E,
        window or _UNLIMITED,
        min(most, MAX_PARTS * sequences * layout.num_kv_heads),
    )
    return out


def _tile_ends(batch: KVBatch, window: int | None) -> Tensor:
    """int32 [B]: running sum of the tiles of 16 tokens that each sequence's query sees, at least one each."""

    def compute() -> Tensor:
        lengths = batch.context_lengths
        first = 0 if window is None else (lengths - window).clamp(min=0) // _TILE
        return ((lengths + (_TILE - 1)) // _TILE - first).clamp(min=1).cumsum(0, dtype=torch.int32)

    return batch.planned(("tile_ends", window), compute)


def equal_chunks(starts: list[int], lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Runs (first, count) of neighbouring sequences with as many queries, more than one, and as long a context."""
    first, end = 0, len(lengths)
    while first < end:
        queries, length = starts[first + 1] - starts[first], lengths[first]
        stop = first + 1
        while (
            stop < end
            and (starts[stop + 1] - starts[stop], lengths[stop]) == (queries, length)
            and (stop + 1 - first) * length <= MAX_WORKSPACE_TOKENS
        ):
            stop += 1
        if queries > 1 and length:
            yield first, stop - first
        first = stop


def kv4_prefill(
    q: Tensor,
    pages: Tensor,
    batch: KVBatch,
    sequence: int,
    length: int,
    layout: KVPageLayout,
    scale: float,
    window: int | None = None,
    count: int = 1,
) -> Tensor:
    """Attention of the last T tokens of sequences of `length` to all of their pages.

    Args:
        q: [count * T, Hq, D], the rows of `count` sequences from number `sequence` of the batch on.
    Returns: [count * T, Hq, D].
    """
    chosen = slice(sequence, sequence + count)
    tables = batch.block_tables[chosen, : -(-length // layout.page_size)]
    sink_pages = None if batch.sink_pages is None else batch.sink_pages[chosen]
    queries = q.view(count, -1, *q.shape[1:])
    room = rounded_length(length)
    is_whole = q.is_cuda and queries.shape[1] == length and (window is None or window >= length)
    if is_whole and room % layout.page_size == 0 and is_planned(count, q.shape[1], room, q.shape[2]):
        tables = pad(tables, (0, room // layout.page_size - tables.shape[1]))  # with page 0: any will do
        keys, values = read_pages(pages, tables, room, layout, sink_pages, q.dtype)
        keys[:, :, length:], values[:, :, length:] = 0.0, 0.0
        return attend_planned(queries, keys, values, scale).flatten(0, 1)
    keys, values = read_pages(pages, tables, length, layout, sink_pages, q.dtype)
    return attend_causally(queries, keys, values, scale, window).flatten(0, 1)


def read_pages(
    pages: Tensor, tables: Tensor, length: int, layout: KVPageLayout, sink_pages: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, length, D] of sequences of one length, dequantised; tables [B, n]: pages in order."""
    count, columns = tables.shape
    heads, dim = layout.num_kv_heads, layout.head_dim
    table = tables.reshape(-1)
    if layout.bits == 16:
        halves = pages[table].view(layout.dtype).view(count, columns, heads, 2, layout.page_size, dim).to(dtype)
        both = halves.permute(3, 0, 2, 1, 4, 5).flatten(3, 4)[:, :, :, :length]
        return both[0], both[1]
    from w4a4.kernels.kv4_read import dequantize_pages

    shape = (heads, count, columns * layout.page_size, dim)
    keys, values = (part.view(shape).transpose(0, 1) for part in dequantize_pages(pages, table, layout, dtype))
    if layout.num_sinks and sink_pages is not None:
        kept = min(layout.num_sinks, length)
        sinks = sink_view(pages.index_select(0, sink_pages), layout).to(dtype)  # [B, Hkv, 2, S, D]
        keys[:, :, :kept], values[:, :, :kept] = (sinks[:, :, 0, :kept], sinks[:, :, 1, :kept])
    return keys[:, :, :length], values[:, :, :length]
