"""Paged KV cache: the page format and the law of writing to it and attending to it, in PyTorch on any device.

KV4 keeps a token's key and value as unsigned 4-bit codes with one scale and one zero point each per kv-head
(`reference.quantize_kv`); the same pages hold 16-bit keys and values where bits = 16. docs/kv4.md draws the bytes;
`kv4_sm90.py` reads the same ones.

Attention always reads what was written: a chunk of a prompt is first written, then attended to through its pages, its
own tokens included. A token's output therefore depends on its sequence alone: not on how the prompt was cut into
chunks, on a prefix found in the cache, on preemption, or on the other sequences of the batch. Everything is computed in
float64 and rounded once at the end, because a BLAS changes its order of summation with the shape of a product; in
float64 that order moves one float32 result in about 1e8 by one unit in the last place. (A GPU prefill that attends to
the fresh bf16 keys and values of its own chunk gives up exactly this: its outputs come closer to those of an
unquantised cache, but they change with the chunk boundaries.)

This file knows nothing of requests or of who owns a page; neighbours are `reference.py` and the engine's block manager.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from w4a4.kernels.reference import block_hadamard, quantize_kv, rms_norm
from w4a4.kernels.rope import apply_rope

Plan = TypeVar("Plan")
QUERY_TILE = 64
"""Queries of a chunk that attend at a time: bounds the scores held, and leaves out most of what causality hides."""


@dataclass(frozen=True)
class KVPageLayout:
    """The bytes of one page. A page holds `page_size` tokens of every kv-head of one layer.

    Per kv-head, one after the other: K codes [page_size, head_dim / 2], V codes likewise (byte j holds element 2j in
    its low nibble and 2j + 1 in its high one), then float16 [page_size, 4]: K scale, K zero, V scale, V zero.
    With bits = 16: K then V, [page_size, head_dim] of `dtype`.

    With num_sinks > 0 the first tokens of every sequence are also kept in 16 bit, and attended to in that form, in one
    extra page of the same pool, the sequence's sink page: per kv-head [2 (K, V), num_sinks, head_dim] of `dtype`.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    bits: int = 4
    num_sinks: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.bits not in (4, 16):
            raise ValueError(f"KV pages have 4 or 16 bits, got {self.bits}")
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"KV pages support head_dim 64, 128 and 256, got {self.head_dim}")
        if self.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads must be positive, got {self.num_kv_heads}")
        if self.page_size < 16 or self.page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, got {self.page_size}")
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"16-bit keys and values are bfloat16 or float16, got {self.dtype}")
        if self.num_sinks and self.bits == 16:
            raise ValueError("sinks are for 4-bit pages: 16-bit pages have every token in 16 bit already")
        if not 0 <= self.num_sinks <= 4:
            raise ValueError(f"num_sinks must be 0 to 4 (they must fit in one page), got {self.num_sinks}")

    @property
    def head_bytes(self) -> int:
        """Bytes of one kv-head in a page."""
        return self.page_size * (self.head_dim + 8 if self.bits == 4 else 4 * self.head_dim)

    @property
    def page_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of num_tokens owns, its sink page included."""
        return -(-num_tokens // self.page_size) + (self.num_sinks > 0 and num_tokens > 0)


def allocate_pages(layout: KVPageLayout, num_pages: int, device: torch.device | str = "cpu") -> Tensor:
    """A zeroed page pool of one layer: uint8 [num_pages, num_kv_heads, head_bytes]."""
    return torch.zeros(num_pages, layout.num_kv_heads, layout.head_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class KVBatch:
    """Which tokens a step computes and where their sequences keep keys and values. One serves all layers of a step.

    block_tables:    int32 [B, max_pages]: page of positions [j * page_size, (j + 1) * page_size); entries past the
                     context are not read
    query_start:     int32 [B + 1]: sequence b owns rows query_start[b] to query_start[b + 1] of q, k and v
    context_lengths: int32 [B]: tokens of the sequence, those of this step included (they are the last ones). 0 marks
                     an empty slot (padding): nothing is written for its rows and their output is 0.
    sink_pages:      int32 [B], or None where the layout has no sinks
    """

    block_tables: Tensor
    query_start: Tensor
    context_lengths: Tensor
    sink_pages: Tensor | None = None
    _plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def planned(self, key: Hashable, compute: Callable[[], Plan]) -> Plan:
        """What `compute` returns, computed once for the step's layers."""
        if key not in self._plans:
            self._plans[key] = compute()
        plan: Plan = self._plans[key]
        return plan

    @cached_property
    def on_host(self) -> tuple[list[int], list[int]]:
        """query_start and context_lengths; waits for the device."""
        return self.query_start.tolist(), self.context_lengths.tolist()

    def decodes(self, sequences: list[int]) -> tuple[Tensor, KVBatch]:
        """The rows of sequences with one query each, int64 [n], and a batch of those sequences alone."""

        def compute() -> tuple[Tensor, KVBatch]:
            device = self.block_tables.device
            index = torch.tensor(sequences, pin_memory=device.type == "cuda").to(device, non_blocking=True)
            starts = torch.arange(len(sequences) + 1, dtype=torch.int32, device=device)
            sinks = None if self.sink_pages is None else self.sink_pages[index]
            batch = KVBatch(self.block_tables[index], starts, self.context_lengths[index], sinks)
            return self.query_start[index].long(), batch

        return self.planned(("decodes", *sequences), compute)

    @cached_property
    def rows(self) -> Tensor:
        """int64 [T]: the sequence of each row."""
        lengths = self.query_start.diff().long()
        return torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(lengths)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]: position of each row's token in its sequence; negative in empty slots."""
        ends = self.query_start[1:].long()
        row_ends = (self.context_lengths.long() - ends)[self.rows]
        return torch.arange(self.rows.shape[0], device=row_ends.device) + row_ends

    def slots(self, layout: KVPageLayout) -> Tensor:
        """int64 [T]: page * page_size + offset of each row's token, or -1 in empty slots."""
        position = self.positions.clamp(min=0)
        page = self.block_tables[self.rows, position // layout.page_size].long()
        return torch.where(self.positions < 0, -1, page * layout.page_size + position % layout.page_size)

    def sink_slots(self, layout: KVPageLayout) -> Tensor | None:
        """int64 [T]: sink page * num_sinks + position of tokens that are sinks, -1 for others; None without sinks."""
        if not layout.num_sinks:
            return None
        if self.sink_pages is None:
            raise ValueError(f"the layout keeps {layout.num_sinks} sinks, so the batch needs sink_pages, got None")
        slot = self.sink_pages[self.rows].long() * layout.num_sinks + self.positions
        return torch.where((self.positions >= 0) & (self.positions < layout.num_sinks), slot, -1)


# Written to pages


def prepare_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, k_mean: Tensor | None, use_hadamard: bool
) -> tuple[Tensor, Tensor]:
    """What q [T, Hq, D] and k [T, Hkv, D] become before they meet pages: RoPE, then the mean off k, then Hadamard.

    k_mean [Hkv, D] is the mean of rotated keys; taking it off moves all scores of a query alike, so softmax does not
    change. The Hadamard matrix is orthogonal, so q·k does not change either. In float32, whatever the inputs' dtype.
    """
    counts = [q.shape[-2], k.shape[-2]]
    q, k = torch.split(apply_rope(torch.cat((q.float(), k.float()), -2), cos, sin), counts, dim=-2)
    if k_mean is not None:
        k = k - k_mean.float()
    if use_hadamard:
        q, k = torch.split(block_hadamard(torch.cat((q, k), -2), q.shape[-1]), counts, dim=-2)
    return q, k


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., D] in [0, 15] to bytes [..., D / 2], element 2j in the low nibble of byte j."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def kv_write(
    k: Tensor, v: Tensor, pages: Tensor, slots: Tensor, layout: KVPageLayout, sink_slots: Tensor | None = None
) -> None:
    """Write k and v [T, Hkv, D] (as `prepare_qk` leaves k) into pages, in place.

    Args:
        slots: int64 [T], `KVBatch.slots`: a token with slot -1 is not written.
        sink_slots: int64 [T], `KVBatch.sink_slots`: sinks go to both places; None without sinks.
    """
    expected = (slots.shape[0], layout.num_kv_heads, layout.head_dim)
    if tuple(k.shape) != expected or tuple(v.shape) != expected:
        raise ValueError(f"k and v must be {list(expected)}, got {list(k.shape)} and {list(v.shape)}")
    keep = slots >= 0
    if not bool(keep.all()):
        k, v, slots = k[keep], v[keep], slots[keep]
        sink_slots = None if sink_slots is None else sink_slots[keep]
    page, offset = slots // layout.page_size, slots % layout.page_size
    if layout.bits == 16:
        halves = _split(pages.view(layout.dtype), 2, layout.page_size, layout.head_dim)
        halves[page, :, 0, offset] = k.to(layout.dtype)
        halves[page, :, 1, offset] = v.to(layout.dtype)
        return
    code_bytes = layout.page_size * layout.head_dim
    codes = _split(pages[..., :code_bytes], 2, layout.page_size, layout.head_dim // 2)
    parameters = _split(pages[..., code_bytes:].view(torch.float16), layout.page_size, 4)
    k_codes, k_scale, k_zero = quantize_kv(k)
    v_codes, v_scale, v_zero = quantize_kv(v)
    codes[page, :, 0, offset] = pack_codes(k_codes)
    codes[page, :, 1, offset] = pack_codes(v_codes)
    parameters[page, :, offset] = torch.stack((k_scale, k_zero, v_scale, v_zero), -1)
    if sink_slots is not None:
        sinks = sink_view(pages, layout)
        (row,) = (sink_slots >= 0).nonzero(as_tuple=True)
        page, offset = sink_slots[row] // layout.num_sinks, sink_slots[row] % layout.num_sinks
        sinks[page, :, 0, offset] = k[row].to(layout.dtype)
        sinks[page, :, 1, offset] = v[row].to(layout.dtype)


def kv_rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
    layout: KVPageLayout,
    sink_slots: Tensor | None = None,
    k_mean: Tensor | None = None,
    use_hadamard: bool = False,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """From the output of the q, k and v layers to pages: q/k norm, `prepare_qk`, `kv_write`. One launch on a GPU.

    Args:
        qkv: [T, Hq + 2 Hkv, D], heads of q, then of k, then of v.
        cos, sin: float32 [T, D / 2].
        norms: gains [D] of the RMSNorm over each head of q and of k, and its eps; None: no norm.
    Returns: q [T, Hq, D] as `kv_attention` takes it: float32 on a CPU, qkv's dtype on a GPU.
    """
    num_heads = qkv.shape[1] - 2 * layout.num_kv_heads
    if num_heads < 1 or qkv.shape[2] != layout.head_dim:
        raise ValueError(f"qkv must be [T, Hq + {2 * layout.num_kv_heads}, {layout.head_dim}], got {list(qkv.shape)}")
    if qkv.is_cuda:
        from w4a4.kernels import kv4_sm90

        return kv4_sm90.kv4_write(qkv, cos, sin, pages, slots, layout, sink_slots, k_mean, use_hadamard, norms, eps)
    q, k, v = torch.split(qkv, [num_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    q, k = prepare_qk(q, k, cos, sin, k_mean, use_hadamard)
    kv_write(k, v, pages, slots, layout, sink_slots)
    return q


def sink_view(pages: Tensor, layout: KVPageLayout) -> Tensor:
    """Pages [N, Hkv, bytes] read as sink pages: [N, Hkv, 2, num_sinks, D] of layout.dtype."""
    used = pages[..., : 4 * layout.num_sinks * layout.head_dim]
    return _split(used.view(layout.dtype), 2, layout.num_sinks, layout.head_dim)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """A view of x [..., product of sizes] as [..., *sizes]."""
    return x.view(*x.shape[:-1], *sizes)


# Read from pages


@dataclass(frozen=True)
class _Group:
    """Sequences that attend together: several of one query each, padded to as many pages, or one of many queries.

    queries: [B, T] rows of q;  page_heads: [B, Hkv, M] page * Hkv + head;  sink_heads: [B, Hkv] likewise or None
    has_sinks: bool [B, 1, 1, 1], whether a sequence's first key is position 0 (else its window has passed the sinks)
    key_positions: [B, n];  query_positions: [B, T]
    hidden: [B, 1, 1, n] keys that no query may see (decode), None if there are none or queries are many
    unused: [B, 1, n, 1] keys past the context: their bytes may be anything, NaN included. None if there are none.
    """

    queries: Tensor
    page_heads: Tensor
    sink_heads: Tensor | None
    has_sinks: Tensor | None
    key_positions: Tensor
    query_positions: Tensor
    hidden: Tensor | None
    unused: Tensor | None


def kv_attention(
    q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of q [T, Hq, D] to the pages of its sequences; a step's own tokens must be written first.

    A query at position i sees position j where i - window < j <= i. Query head h reads kv-head h // (Hq / Hkv).

    Args:
        scale: factor of q·k before softmax, usually head_dim ** -0.5.
        window: sliding window in tokens, the query's own included; None sees everything.
    Returns: [T, Hq, D] in q's dtype; 0 for rows of empty slots.
    """
    num_tokens, num_heads, head_dim = q.shape
    if head_dim != layout.head_dim or num_heads % layout.num_kv_heads:
        raise ValueError(
            f"q must be [T, multiple of {layout.num_kv_heads}, {layout.head_dim}] as the pages are, got {list(q.shape)}"
        )
    if q.is_cuda:
        from w4a4.kernels import kv4_sm90

        return kv4_sm90.attention(q, pages, batch, layout, scale, window)
    return attend_in_float64(q, pages, batch, layout, scale, window)


def attend_in_float64(
    q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None = None
) -> Tensor:
    """The law of `kv_attention`, on whatever device the tensors are."""
    num_tokens, num_heads, head_dim = q.shape
    groups = batch.planned((layout, window), lambda: list(_plan(batch, layout, window)))
    output = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64, device=q.device)
    query = (q.double() * scale).view(num_tokens, layout.num_kv_heads, -1, head_dim)  # [T, Hkv, G, D]
    for group in groups:
        result = _attend(query[group.queries], pages, group, layout, window)
        output[group.queries.flatten()] = result.flatten(0, 1).flatten(1, 2)
    return output.to(q.dtype)


def _plan(batch: KVBatch, layout: KVPageLayout, window: int | None) -> Iterator[_Group]:
    """Split a batch into groups. Decodes share one if their page counts round up to the same power of two."""
    starts, lengths = batch.on_host
    if layout.num_sinks and batch.sink_pages is None:
        raise ValueError(f"the layout keeps {layout.num_sinks} sinks, so the batch needs sink_pages, got None")
    decodes: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        num_queries = starts[sequence + 1] - starts[sequence]
        if num_queries > length > 0:
            raise ValueError(f"sequence {sequence} has {num_queries} queries but a context of {length} tokens")
        if length and num_queries == 1:
            num_pages = -(-length // layout.page_size) - _first_page(length - 1, layout, window)
            decodes.setdefault((num_pages - 1).bit_length(), []).append(sequence)
        elif length and num_queries:
            yield _group(batch, layout, window, [sequence], starts, lengths)
    for sequences in decodes.values():
        yield _group(batch, layout, window, sequences, starts, lengths)


def _first_page(position: int, layout: KVPageLayout, window: int | None) -> int:
    """The first page that a query at position can see."""
    return 0 if window is None else max(0, position - window + 1) // layout.page_size


def _group(
    batch: KVBatch,
    layout: KVPageLayout,
    window: int | None,
    sequences: list[int],
    starts: list[int],
    lengths: list[int],
) -> _Group:
    device = batch.block_tables.device
    num_queries = starts[sequences[0] + 1] - starts[sequences[0]]
    first = [_first_page(lengths[s] - num_queries, layout, window) for s in sequences]
    num_pages = max(-(-lengths[s] // layout.page_size) - page for s, page in zip(sequences, first, strict=True))

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    length = column([lengths[s] for s in sequences])
    queries = column([starts[s] for s in sequences]) + torch.arange(num_queries, device=device)
    query_positions = length - num_queries + torch.arange(num_queries, device=device)
    table_columns = column(first) + torch.arange(num_pages, device=device)
    used = table_columns * layout.page_size < length
    table = torch.where(used, batch.block_tables[column(sequences), table_columns * used].long(), 0)  # padding: page 0
    heads = torch.arange(layout.num_kv_heads, device=device)
    keys = column(first) * layout.page_size + torch.arange(num_pages * layout.page_size, device=device)
    hidden = None
    if num_queries == 1:
        hidden = (keys > query_positions) | (keys <= query_positions - (window or 1 << 62))
        hidden = hidden[:, None, None] if bool(hidden.any()) else None
    sink_heads = has_sinks = None
    if layout.num_sinks and min(first) == 0:
        assert batch.sink_pages is not None
        sink_heads = batch.sink_pages[sequences].long().unsqueeze(1) * layout.num_kv_heads + heads
        has_sinks = (column(first) == 0)[:, :, None, None]
    page_heads = table.unsqueeze(1) * layout.num_kv_heads + heads[:, None]
    unused = (keys >= length)[:, None, :, None]
    return _Group(
        queries, page_heads, sink_heads, has_sinks, keys, query_positions, hidden,
        unused if bool(unused.any()) else None,
    )  # fmt: skip


def _attend(query: Tensor, pages: Tensor, group: _Group, layout: KVPageLayout, window: int | None) -> Tensor:
    """Attention of query [B, T, Hkv, G, D] (float64, scaled) to a group's pages: float64 [B, T, Hkv, G, D].

    Scales and zero points meet scores and probabilities instead of elements: q·(s c + z) = s (q·c) + z Σq.
    """
    batch, num_queries, num_kv_heads, group_size, head_dim = query.shape
    keys, values, parameters = _read_pages(pages, group.page_heads, layout)
    if group.unused is not None:
        (values if parameters is None else parameters).masked_fill_(group.unused, 0.0)
    sinks, has_sinks = None, group.has_sinks
    if group.sink_heads is not None:
        sinks = sink_view(pages.flatten(0, 1)[group.sink_heads], layout).double()  # [B, Hkv, 2, S, D]
        if group.unused is not None:
            sinks[:, :, 1].masked_fill_(group.unused[:, :, : layout.num_sinks], 0.0)
    outputs = []
    for start in range(0, num_queries, QUERY_TILE):
        rows = query[:, start : start + QUERY_TILE]
        width = rows.shape[1]
        end = keys.shape[2] - (num_queries - start - width) // layout.page_size * layout.page_size  # later keys: hidden
        flat = rows.permute(0, 2, 1, 3, 4).reshape(batch, num_kv_heads, width * group_size, head_dim)
        scores = flat @ keys[:, :, :end].transpose(-1, -2)
        if parameters is not None:
            scores = scores * parameters[:, :, :end, 0].unsqueeze(2)
            scores += flat.sum(-1, keepdim=True) * parameters[:, :, :end, 1].unsqueeze(2)
        if sinks is not None and has_sinks is not None:
            exact = flat @ sinks[:, :, 0].transpose(-1, -2)
            scores[..., : layout.num_sinks] = torch.where(has_sinks, exact, scores[..., : layout.num_sinks])
        if group.hidden is not None:
            scores.masked_fill_(group.hidden, -torch.inf)
        elif num_queries > 1:
            position = group.query_positions[:, start : start + QUERY_TILE].unsqueeze(-1)
            key_positions = group.key_positions[:, None, :end]
            hidden = key_positions > position
            if window is not None:
                hidden |= key_positions <= position - window
            scores.view(batch, num_kv_heads, width, group_size, end).masked_fill_(hidden[:, None, :, None], -torch.inf)
        probabilities = torch.softmax(scores, -1)
        extra: Tensor | float = 0.0
        if sinks is not None and has_sinks is not None:
            first = torch.where(has_sinks, probabilities[..., : layout.num_sinks], 0.0)
            probabilities[..., : layout.num_sinks] -= first
            extra = first @ sinks[:, :, 1]
        if parameters is not None:
            extra = extra + probabilities @ parameters[:, :, :end, 3:]
            probabilities *= parameters[:, :, :end, 2].unsqueeze(2)
        result = probabilities @ values[:, :, :end] + extra
        outputs.append(result.view(batch, num_kv_heads, width, group_size, head_dim).permute(0, 2, 1, 3, 4))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _read_pages(pages: Tensor, page_heads: Tensor, layout: KVPageLayout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values float64 [B, Hkv, n, D] (codes where bits = 4) and float64 parameters [B, Hkv, n, 4] or None."""
    raw = pages.flatten(0, 1)[page_heads]  # [B, Hkv, M, bytes]
    if layout.bits == 16:
        halves = _split(raw.view(layout.dtype), 2, layout.page_size, layout.head_dim).double()
        return halves[:, :, :, 0].flatten(2, 3), halves[:, :, :, 1].flatten(2, 3), None
    code_bytes = layout.page_size * layout.head_dim
    codes = _split(raw[..., :code_bytes], 2, layout.page_size, layout.head_dim // 2)
    parameters = _split(raw[..., code_bytes:].view(torch.float16), layout.page_size, 4).double()
    values = [unpack_codes(codes[:, :, :, side].flatten(2, 3)).double() for side in (0, 1)]
    return values[0], values[1], parameters.flatten(2, 3)
