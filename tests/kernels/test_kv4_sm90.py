"""The Hopper kernels of the KV cache against the reference on a CPU; without a GPU, the planning around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from w4a4.kernels.kv4 import (
    KVBatch,
    KVPageLayout,
    allocate_pages,
    kv_attention,
    kv_rope_write,
    kv_write,
)
from w4a4.kernels.kv4_sm90 import (
    _is_long,
    _tile_ends,
    attention,
    decode_variant,
    equal_chunks,
    kernels_of,
    write_variant,
)

RAGGED = [1, 2, 4, 5, 15, 16, 17, 31, 33, 64, 127, 128, 129, 300, 0, 1000]
# relative error against float64 on the same pages; rounding the output alone costs 1.7e-3 or, in float16, 2.1e-4
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 8e-4}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(layout: KVPageLayout, lengths: list[int], seed: int = 0) -> tuple[Tensor, KVBatch]:
    """Pages on a CPU that hold random sequences, and the batch in which each decodes its last token."""
    num_pages = [-(-n // layout.page_size) for n in lengths]
    order = torch.randperm(sum(num_pages) + len(lengths), generator=torch.Generator().manual_seed(seed)) + 1
    pages = allocate_pages(layout, len(order) + 1).fill_(0xFF)  # NaN wherever nobody writes
    tables = torch.full((len(lengths), max(1, *num_pages)), 2**31 - 1, dtype=torch.int32)  # must not be read
    start = len(lengths)
    for row, count in enumerate(num_pages):
        tables[row, :count] = order[start : start + count]
        start += count
    sinks = order[: len(lengths)].to(torch.int32) if layout.num_sinks else None
    for row, n in enumerate(lengths):
        if n == 0:
            if sinks is not None:
                sinks[row] = 2**31 - 1  # must not be read
            continue
        one = KVBatch(
            tables[row : row + 1],
            torch.tensor([0, n], dtype=torch.int32),
            torch.tensor([n], dtype=torch.int32),
            None if sinks is None else sinks[row : row + 1],
        )
        k = 2 * random(n, layout.num_kv_heads, layout.head_dim, seed=seed + 2 * row) + 0.3
        v = random(n, layout.num_kv_heads, layout.head_dim, seed=seed + 2 * row + 1) + 0.2
        kv_write(k, v, pages, one.slots(layout), layout, one.sink_slots(layout))
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    return pages, KVBatch(tables, starts, torch.tensor(lengths, dtype=torch.int32), sinks)


def on_gpu(batch: KVBatch) -> KVBatch:
    sinks = None if batch.sink_pages is None else batch.sink_pages.cuda()
    return KVBatch(batch.block_tables.cuda(), batch.query_start.cuda(), batch.context_lengths.cuda(), sinks)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The worst sequence's; NaN is infinite."""
    difference = (got.cpu().double() - expected).flatten(1).norm(dim=1)
    error = difference / expected.flatten(1).norm(dim=1).clamp(min=1e-9)
    return float(error.nan_to_num(nan=torch.inf).max())


@pytest.mark.parametrize("window", [None, 3, 16, 100])
def test_tiles_are_those_that_the_window_touches(window: int | None) -> None:
    lengths = torch.arange(0, 200, dtype=torch.int32)
    batch = KVBatch(torch.zeros(200, 13, dtype=torch.int32), torch.arange(201, dtype=torch.int32), lengths)
    expected = [max(1, len({p // 16 for p in range(max(0, n - window) if window else 0, n)})) for n in lengths.tolist()]
    assert _tile_ends(batch, window).tolist() == torch.tensor(expected).cumsum(0).tolist()


def test_neighbouring_chunks_of_equal_shape_run_together() -> None:
    lengths = [40, 40, 40, 7, 0, 16, 16, 50_000, 50_000]
    queries = [40, 40, 8, 1, 0, 16, 16, 5, 5]
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    assert list(equal_chunks(starts, lengths)) == [(0, 2), (2, 1), (5, 2), (7, 1), (8, 1)]


@pytest.mark.parametrize("window", [None, 20])
def test_chunks_of_16_bit_pages_match_the_law_on_a_cpu(window: int | None) -> None:
    """What runs through PyTorch alone does so anywhere: equal chunks, a chunk behind a prefix, odd lengths."""
    layout = KVPageLayout(2, 64, 16, 16)
    lengths, queries = [40, 40, 40, 33], [40, 40, 8, 33]
    pages, decodes = filled(layout, lengths)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    batch = KVBatch(decodes.block_tables, starts, decodes.context_lengths)
    q = random(sum(queries), 4, 64, seed=3)
    expected = kv_attention(q, pages, batch, layout, 0.125, window)
    torch.testing.assert_close(attention(q, pages, batch, layout, 0.125, window), expected, rtol=1e-5, atol=1e-5)


def test_kernel_names_tell_variants_apart() -> None:
    names = set()
    layouts = [
        KVPageLayout(2, dim, page, bits, sinks, dtype)
        for dim in (64, 128)
        for page in (16, 32)
        for bits, sinks in ((4, 0), (4, 4), (16, 0))
        for dtype in (torch.bfloat16, torch.float16)
    ]
    for layout in layouts:
        for heads in (2, 8):
            for dtype in (torch.bfloat16, torch.float16):
                names.add(decode_variant(layout, heads, dtype).name)
                for flags in ((False, False, False), (True, False, False), (False, True, False), (False, False, True)):
                    names.add(write_variant(layout, dtype, *flags).name)
    assert len(names) == 2 * 2 * 2 * 2 * 2 * 2 + 2 * 2 * 3 * 2 * 2 * 4
    used = kernels_of(layouts[0], 8, torch.bfloat16, False, True, True)
    assert sorted(used) == [
        "kv4-decode-d64-g4-p16-s0-w4-bb-p",
        "kv4-decode-d64-g4-p16-s0-w8-bb-p",
        "kv4-write-d64-p16-b4-s0-bb-mhp",
    ]


def test_few_long_kv_heads_run_in_wide_blocks() -> None:
    layout = KVPageLayout(8, 128)

    def is_long(sequences: int, tokens: int) -> bool:
        tables = torch.zeros(sequences, tokens // 16, dtype=torch.int32)
        lengths = torch.ones(sequences, dtype=torch.int32)
        return _is_long(KVBatch(tables, torch.arange(sequences + 1), lengths), layout)

    assert is_long(1, 131072) and is_long(8, 8192)
    assert not is_long(9, 8192) and not is_long(1, 8176)
    wide, narrow = (decode_variant(layout, 32, torch.bfloat16, is_long) for is_long in (True, False))
    assert (wide.warps, wide.blocks_per_multiprocessor) == (8, 2)
    assert (narrow.warps, narrow.blocks_per_multiprocessor) == (4, 4)
    for heads, dim in ((128, 128), (32, 256)):  # more shared memory than a multiprocessor has twice
        large = decode_variant(KVPageLayout(8, dim), heads, torch.bfloat16, is_long=True)
        assert (large.warps, large.blocks_per_multiprocessor) == (4, 2)


def test_what_no_kernel_takes_is_refused() -> None:
    layout = KVPageLayout(2, 64)
    with pytest.raises(ValueError, match="1 to 16 query heads"):
        decode_variant(layout, 34, torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        decode_variant(layout, 8, torch.float32)
    with pytest.raises(ValueError, match="float32"):
        write_variant(layout, torch.float32, False, False, False)


DECODES = [
    (KVPageLayout(8, 128), 4, None, torch.bfloat16),
    (KVPageLayout(8, 128), 4, None, torch.float16),
    (KVPageLayout(2, 128, page_size=64), 4, None, torch.float16),
    (KVPageLayout(8, 128, num_sinks=4), 4, None, torch.float16),
    (KVPageLayout(8, 128, num_sinks=4), 8, 100, torch.float16),
    (KVPageLayout(2, 128, num_sinks=4), 4, 3, torch.float16),
    (KVPageLayout(3, 64, num_sinks=4), 3, None, torch.bfloat16),
    (KVPageLayout(3, 64, num_sinks=4, dtype=torch.float16), 3, 130, torch.float16),
    (KVPageLayout(4, 64, page_size=32), 1, None, torch.float16),
    (KVPageLayout(2, 64), 7, 16, torch.float16),
    (KVPageLayout(2, 256, num_sinks=4), 4, None, torch.float16),
    (KVPageLayout(2, 128, num_sinks=4), 12, None, torch.float16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "group_size", "window", "dtype"), DECODES)
def test_decode(layout: KVPageLayout, group_size: int, window: int | None, dtype: torch.dtype) -> None:
    pages, batch = filled(layout, RAGGED)
    q = random(len(RAGGED), layout.num_kv_heads * group_size, layout.head_dim, seed=99).to(dtype)
    scale = layout.head_dim**-0.5
    expected = kv_attention(q.double(), pages, batch, layout, scale, window)
    gpu_pages, gpu_batch = pages.cuda(), on_gpu(batch)
    got = kv_attention(q.cuda(), gpu_pages, gpu_batch, layout, scale, window)
    assert relative_error(got, expected) < TOLERANCE[dtype]
    for _ in range(3):
        assert torch.equal(kv_attention(q.cuda(), gpu_pages, gpu_batch, layout, scale, window), got), "not repeatable"


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [4, 8])
def test_decode_of_one_long_sequence_among_short_ones(group_size: int) -> None:
    layout, lengths = KVPageLayout(2, 128, num_sinks=4), [100_000, 1, 300, 0, 17]
    pages, batch = filled(layout, lengths)
    q = random(len(lengths), 2 * group_size, 128, seed=99).half()
    expected = kv_attention(q.double(), pages, batch, layout, 0.1)
    assert relative_error(kv_attention(q.cuda(), pages.cuda(), on_gpu(batch), layout, 0.1), expected) < 8e-4


@pytest.mark.gpu
@pytest.mark.parametrize("sharpness", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])
def test_decode_keeps_its_precision_over_the_range_of_values(sharpness: float, size: float) -> None:
    """Flat and peaked softmax, small and large values: float16 inside the kernel neither overflows nor vanishes."""
    layout = KVPageLayout(2, 64, dtype=torch.float16)
    pages, batch = filled(layout, [2000])
    parameters = pages[..., 16 * 64 :].view(torch.float16).view(*pages.shape[:-1], 16, 4)
    parameters[..., 2:] *= size
    q = sharpness * random(1, 8, 64, seed=5).half()
    expected = kv_attention(q.double(), pages, batch, layout, 0.125)
    assert relative_error(kv_attention(q.cuda(), pages.cuda(), on_gpu(batch), layout, 0.125), expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [KVPageLayout(2, 128, num_sinks=4), KVPageLayout(2, 128, bits=16)], ids=str)
def test_decode_replays_in_a_cuda_graph(layout: KVPageLayout) -> None:
    """Lengths and pages change between replays, in place; a slot may become empty."""
    lengths = [70, 5, 200, 33]
    pages, batch = filled(layout, lengths)
    q = random(4, 8, 128, seed=1).bfloat16()
    gpu_pages, query, static = pages.cuda(), q.cuda(), on_gpu(batch)
    kv_attention(query, gpu_pages, on_gpu(batch), layout, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kv_attention(query, gpu_pages, static, layout, 0.1)
    for shorter in ([70, 5, 200, 33], [1, 5, 16, 17], [0, 4, 199, 2]):
        static.context_lengths.copy_(torch.tensor(shorter, dtype=torch.int32))
        graph.replay()
        now = KVBatch(batch.block_tables, batch.query_start, static.context_lengths.cpu(), batch.sink_pages)
        expected = kv_attention(q.double(), pages, now, layout, 0.1)
        assert relative_error(output, expected) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [1, 4, 7])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_of_16_bit_pages(group_size: int, window: int | None, page_size: int) -> None:
    layout = KVPageLayout(2, 64, page_size, bits=16, dtype=torch.float16)
    pages, batch = filled(layout, RAGGED)
    q = random(len(RAGGED), 2 * group_size, 64, seed=99).half()
    expected = kv_attention(q.double(), pages, batch, layout, 0.125, window)
    got = kv_attention(q.cuda(), pages.cuda(), on_gpu(batch), layout, 0.125, window)
    assert relative_error(got, expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout",
    [KVPageLayout(2, 128, num_sinks=4), KVPageLayout(3, 64, page_size=32), KVPageLayout(2, 64, bits=16)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_of_prompts_among_decodes(layout: KVPageLayout, window: int | None) -> None:
    lengths, chunks = [50, 200, 33, 7, 64], [50, 120, 1, 3, 1]
    pages, batch = filled(layout, lengths)
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    batch = KVBatch(batch.block_tables.clamp(max=pages.shape[0] - 1), starts, batch.context_lengths, batch.sink_pages)
    q = random(sum(chunks), 2 * layout.num_kv_heads, layout.head_dim, seed=9).bfloat16()
    expected = kv_attention(q.double(), pages, batch, layout, 0.1, window)
    got = kv_attention(q.cuda(), pages.cuda(), on_gpu(batch), layout, 0.1, window)
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert relative_error(got[None, first:last].flatten(1), expected[None, first:last].flatten(1)) < 8e-3


WRITES = [
    (KVPageLayout(8, 128), torch.bfloat16, False, False, True),
    (KVPageLayout(2, 128, page_size=64, num_sinks=4), torch.bfloat16, False, True, True),
    (KVPageLayout(3, 64, num_sinks=4), torch.bfloat16, False, True, True),
    (KVPageLayout(3, 64, num_sinks=3, dtype=torch.float16), torch.float16, False, True, False),
    (KVPageLayout(2, 256), torch.bfloat16, False, True, True),
    (KVPageLayout(2, 128, bits=16), torch.bfloat16, False, False, False),
    (KVPageLayout(2, 128, num_sinks=4), torch.bfloat16, True, True, True),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "dtype", "has_norm", "has_mean", "use_hadamard"), WRITES)
@pytest.mark.parametrize("tokens", [1, 77])
def test_write_leaves_the_bytes_of_the_law(
    layout: KVPageLayout, dtype: torch.dtype, has_norm: bool, has_mean: bool, use_hadamard: bool, tokens: int
) -> None:
    dim, heads = layout.head_dim, 2 * layout.num_kv_heads + 5 * layout.num_kv_heads
    qkv = (2 * random(tokens, heads, dim, seed=0) + 0.2).to(dtype)
    qkv[0, -1] = 0.5  # a constant value: its scale is 0
    angles = random(tokens, dim // 2, seed=1)
    mean = random(layout.num_kv_heads, dim, seed=2) if has_mean else None
    norms = (1 + random(dim, seed=3).to(dtype) / 8, 1 + random(dim, seed=4).to(dtype) / 8) if has_norm else None
    pages = allocate_pages(layout, 12)
    order = torch.randperm(8 * layout.page_size, generator=torch.Generator().manual_seed(0))
    slots = torch.where(torch.arange(tokens) % 9 == 4, -1, order[:tokens])
    sinks = None
    if layout.num_sinks:
        sinks = torch.full((tokens,), -1)
        sinks[:3] = (torch.tensor([9, 10, 11]) * layout.num_sinks + torch.arange(3))[: min(3, tokens)]
    arguments = (angles.cos(), angles.sin(), pages, slots, layout, sinks, mean, use_hadamard, norms)
    gpu = [x.cuda() if isinstance(x, Tensor) else x for x in arguments]
    if norms is not None:
        gpu[8] = tuple(norm.cuda() for norm in norms)
    q = kv_rope_write(qkv, *arguments, eps=1e-6)  # type: ignore[arg-type]
    gpu_q = kv_rope_write(qkv.cuda(), *gpu, eps=1e-6)  # type: ignore[arg-type]
    assert gpu_q.dtype == dtype
    if has_norm:  # the sum of squares has another order: codes may move by one where they were near a half
        assert relative_error(gpu_q, q.double()) < 4e-3
        assert float((gpu[2].cpu() != pages).float().mean()) < 5e-3
    else:
        assert torch.equal(gpu[2].cpu(), pages)
        assert torch.equal(gpu_q.cpu(), q.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [576, 1000])
@pytest.mark.parametrize("num_sinks", [0, 4])
def test_whole_prompts_are_the_same_with_a_plan(length: int, num_sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are rounded up and one that is not; unused bytes of pages hold NaN."""
    from w4a4.kernels import prompt_attention

    layout = KVPageLayout(2, 128, num_sinks=num_sinks)
    pages, decodes = filled(layout, [length, length])
    starts = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    tables = decodes.block_tables.clamp(max=pages.shape[0] - 1)
    batch = KVBatch(tables, starts, decodes.context_lengths, decodes.sink_pages)
    q = random(2 * length, 8, 128, seed=7).bfloat16()
    expected = kv_attention(q.double(), pages, batch, layout, 0.1)
    monkeypatch.setattr(prompt_attention, "PLAN_OPERATIONS", 0.0)
    monkeypatch.setattr(prompt_attention, "MIN_OPERATIONS", 0.0)
    got = kv_attention(q.cuda(), pages.cuda(), on_gpu(batch), layout, 0.1)
    assert relative_error(got[None].flatten(1), expected[None].flatten(1)) < 8e-3
