"""Pages against a dense float64 attention over the values they should hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from w4a4.kernels.kv4 import (
    KVBatch,
    KVPageLayout,
    allocate_pages,
    kv_attention,
    kv_write,
    pack_codes,
    prepare_qk,
    unpack_codes,
)
from w4a4.kernels.reference import dequantize_kv, quantize_kv


def random_tokens(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sequences:
    """Sequences over one page pool, their pages dealt out in random order, fed in chunks."""

    def __init__(self, layout: KVPageLayout, lengths: list[int], num_heads: int, seed: int = 0) -> None:
        self.layout, self.lengths = layout, lengths
        shape = (layout.num_kv_heads, layout.head_dim)
        self.k = [3 * random_tokens(n, *shape, seed=seed + 10 * i) + 0.5 for i, n in enumerate(lengths)]
        self.v = [random_tokens(n, *shape, seed=seed + 10 * i + 1) for i, n in enumerate(lengths)]
        self.q = [random_tokens(n, num_heads, shape[1], seed=seed + 10 * i + 2) for i, n in enumerate(lengths)]
        num_pages = [-(-n // layout.page_size) for n in lengths]
        total = sum(num_pages) + len(lengths)
        order = torch.randperm(total + 3, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.pages = allocate_pages(layout, total + 3)
        self.pages.fill_(0xFF)  # what nobody wrote must not matter: these are NaN in either 16-bit type
        self.sinks = order[: len(lengths)]
        self.tables = torch.zeros(len(lengths), max(num_pages), dtype=torch.int32)
        start = len(lengths)
        for row, count in enumerate(num_pages):
            self.tables[row, :count] = order[start : start + count]
            start += count

    def batch(self, spans: dict[int, tuple[int, int]]) -> KVBatch:
        """A step that computes tokens [first, last) of the given sequences."""
        rows = torch.tensor(list(spans))
        widths = torch.tensor([0] + [last - first for first, last in spans.values()])
        return KVBatch(
            block_tables=self.tables[rows],
            query_start=widths.cumsum(0).to(torch.int32),
            context_lengths=torch.tensor([last for _, last in spans.values()], dtype=torch.int32),
            sink_pages=self.sinks[rows] if self.layout.num_sinks else None,
        )

    def step(self, spans: dict[int, tuple[int, int]], window: int | None = None) -> list[Tensor]:
        batch = self.batch(spans)
        k, v, q = (
            torch.cat([x[s][first:last] for s, (first, last) in spans.items()]) for x in (self.k, self.v, self.q)
        )
        kv_write(k, v, self.pages, batch.slots(self.layout), self.layout, batch.sink_slots(self.layout))
        output = kv_attention(q, self.pages, batch, self.layout, self.layout.head_dim**-0.5, window)
        return list(output.split([last - first for first, last in spans.values()]))

    def stored(self, x: Tensor) -> Tensor:
        """What a page should remember of x [n, Hkv, D], float64."""
        if self.layout.bits == 16:
            return x.to(self.layout.dtype).double()
        codes, scale, zero = quantize_kv(x)
        values = codes.double() * scale.double().unsqueeze(-1) + zero.double().unsqueeze(-1)
        values[: self.layout.num_sinks] = x[: self.layout.num_sinks].to(self.layout.dtype).double()
        return values

    def expected(self, sequence: int, first: int, last: int, window: int | None = None) -> Tensor:
        """Dense float64 attention of tokens [first, last) of one sequence."""
        group = self.q[sequence].shape[1] // self.layout.num_kv_heads
        k = self.stored(self.k[sequence])[:last].repeat_interleave(group, 1)
        v = self.stored(self.v[sequence])[:last].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", self.q[sequence][first:last].double(), k) * self.layout.head_dim**-0.5
        distance = torch.arange(first, last)[:, None] - torch.arange(last)
        hidden = (distance < 0) | (distance >= (window or last + 1))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


LAYOUTS = [
    KVPageLayout(2, 64),
    KVPageLayout(3, 64, num_sinks=4),
    KVPageLayout(2, 128, page_size=32, num_sinks=4, dtype=torch.float16),
    KVPageLayout(1, 256, page_size=64),
    KVPageLayout(2, 64, bits=16),
    KVPageLayout(1, 128, page_size=32, bits=16, dtype=torch.float16),
]
RAGGED = [1, 3, 15, 16, 17, 31, 32, 33, 63, 65, 150]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 16, 20])
def test_prefill_and_decode_match_dense_attention(layout: KVPageLayout, group_size: int, window: int | None) -> None:
    sequences = Sequences(layout, RAGGED, layout.num_kv_heads * group_size)
    prompts = sequences.step({i: (0, n) for i, n in enumerate(RAGGED)}, window)
    for i, output in enumerate(prompts):
        assert relative_error(output, sequences.expected(i, 0, RAGGED[i], window)) < 1e-6
    decodes = sequences.step({i: (n - 1, n) for i, n in enumerate(RAGGED)}, window)
    for i, output in enumerate(decodes):
        assert relative_error(output, sequences.expected(i, RAGGED[i] - 1, RAGGED[i], window)) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_output_depends_on_the_sequence_alone(layout: KVPageLayout, window: int | None) -> None:
    """Alone or in a batch, in one chunk, in several or token by token: the same bits."""
    whole = Sequences(layout, RAGGED, layout.num_kv_heads * 3)
    together = whole.step({i: (0, n) for i, n in enumerate(RAGGED)}, window)
    alone, chunked = (Sequences(layout, RAGGED, layout.num_kv_heads * 3) for _ in range(2))
    for i, length in enumerate(RAGGED):
        assert torch.equal(alone.step({i: (0, length)}, window)[0], together[i])
        cuts = [0, *(c for c in (2, 7, 24, 64) if c < length), length]
        parts = [chunked.step({i: span}, window)[0] for span in zip(cuts[:-1], cuts[1:], strict=True)]
        assert torch.equal(torch.cat(parts), together[i])
    mixed = whole.step({10: (40, 150), 2: (14, 15), 5: (30, 31), 7: (32, 33)}, window)
    assert torch.equal(mixed[0], together[10][40:])
    for output, i in zip(mixed[1:], (2, 5, 7), strict=True):
        assert torch.equal(output[0], together[i][-1])
    for position in range(33):
        assert torch.equal(alone.step({7: (position, position + 1)}, window)[0][0], together[7][position])


def test_long_chunk_crosses_query_tiles() -> None:
    sequences = Sequences(KVPageLayout(1, 64, num_sinks=4), [333], 2)
    first = sequences.step({0: (0, 101)})[0]
    rest = sequences.step({0: (101, 333)})[0]
    assert relative_error(torch.cat([first, rest]), sequences.expected(0, 0, 333)) < 1e-6


def test_bytes_of_a_page() -> None:
    """The documented format, byte by byte: codes low nibble first, then scale and zero of K and V."""
    layout = KVPageLayout(2, 64)
    pages = allocate_pages(layout, 3)
    k, v = random_tokens(1, 2, 64, seed=0), random_tokens(1, 2, 64, seed=1)
    kv_write(k, v, pages, torch.tensor([2 * 16 + 5]), layout)
    for head in range(2):
        page = pages[2, head]
        for side, x in enumerate((k, v)):
            codes, scale, zero = quantize_kv(x[0, head])
            row = page[side * 512 + 5 * 32 : side * 512 + 6 * 32]
            assert torch.equal(torch.stack((row % 16, row // 16), 1).flatten(), codes)
            parameters = page[1024 + 5 * 8 : 1024 + 6 * 8].view(torch.float16)
            assert torch.equal(parameters[2 * side : 2 * side + 2], torch.stack((scale, zero)))
    assert int((pages != 0).any(-1).sum()) == 2, "one token touches one page of each head"


def test_sink_page_holds_first_tokens_in_16_bit() -> None:
    layout = KVPageLayout(2, 64, num_sinks=4, dtype=torch.float16)
    sequences = Sequences(layout, [20], 2)
    sequences.step({0: (0, 3)})
    sequences.step({0: (3, 20)})
    stored = sequences.pages[sequences.sinks[0].item(), :, : 2 * 4 * 64 * 2].view(torch.float16).view(2, 2, 4, 64)
    assert torch.equal(stored[:, 0].transpose(0, 1), sequences.k[0][:4].half())
    assert torch.equal(stored[:, 1].transpose(0, 1), sequences.v[0][:4].half())


def test_empty_slots_write_nothing_and_give_zero() -> None:
    layout = KVPageLayout(1, 64, num_sinks=4)
    pages = allocate_pages(layout, 4)
    batch = KVBatch(
        block_tables=torch.tensor([[0], [2]], dtype=torch.int32),
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lengths=torch.tensor([0, 1], dtype=torch.int32),
        sink_pages=torch.tensor([1, 3], dtype=torch.int32),
    )
    k, v, q = (random_tokens(2, 1, 64, seed=s) for s in range(3))
    kv_write(k, v, pages, batch.slots(layout), layout, batch.sink_slots(layout))
    assert pages[:2].count_nonzero() == 0 and pages[2:].count_nonzero() > 0
    output = kv_attention(q, pages, batch, layout, 0.125)
    assert torch.equal(output[0], torch.zeros(1, 64))
    assert torch.equal(output[1], v[1].bfloat16().float())


def test_codes_pack_and_unpack() -> None:
    codes = torch.randint(0, 16, (3, 5, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_codes(codes)
    assert packed[1, 2, 3] == codes[1, 2, 6] + 16 * codes[1, 2, 7]
    assert torch.equal(unpack_codes(packed), codes)


def test_prepared_scores_differ_by_one_constant_per_query() -> None:
    """Taking the mean off k and rotating both by Hadamard leaves softmax as it was."""
    q, k = random_tokens(6, 4, 64, seed=0), random_tokens(6, 2, 64, seed=1)
    angles, mean = random_tokens(6, 32, seed=2), random_tokens(2, 64, seed=3)

    def probabilities(mean: Tensor | None, use_hadamard: bool) -> Tensor:
        queries, keys = prepare_qk(q, k, angles.cos(), angles.sin(), mean, use_hadamard)
        return torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(2, 1)).softmax(-1)

    assert torch.allclose(probabilities(mean, True), probabilities(None, False), atol=1e-5)


def test_stored_values_are_near_what_was_written() -> None:
    x = random_tokens(9, 2, 128, seed=0)
    codes, scale, zero = quantize_kv(x)
    error = (dequantize_kv(codes, scale, zero) - x).abs().amax(-1)
    assert bool((error <= 0.52 * scale.float() + 1e-3).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 8}, "4 or 16"),
        ({"head_dim": 96}, "head_dim 64"),
        ({"page_size": 8}, "multiple of 16"),
        ({"page_size": 24}, "multiple of 16"),
        ({"num_sinks": 5}, "0 to 4"),
        ({"bits": 16, "num_sinks": 4}, "sinks are for 4-bit"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"num_kv_heads": 0}, "positive"),
    ],
)
def test_impossible_layouts_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVPageLayout(**{"num_kv_heads": 2, "head_dim": 64, **arguments})  # type: ignore[arg-type]


def test_wrong_arguments_are_refused() -> None:
    layout = KVPageLayout(2, 64, num_sinks=4)
    pages = allocate_pages(layout, 2)
    one = torch.ones(1, dtype=torch.int32)
    batch = KVBatch(one[None] * 0, torch.tensor([0, 1], dtype=torch.int32), one)
    with pytest.raises(ValueError, match=r"\[1, 2, 64\]"):
        kv_write(torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), pages, batch.slots(layout), layout)
    with pytest.raises(ValueError, match="sink_pages"):
        batch.sink_slots(layout)
    with pytest.raises(ValueError, match="sink_pages"):
        kv_attention(torch.zeros(1, 2, 64), pages, batch, layout, 1.0)
    with pytest.raises(ValueError, match="multiple of 2"):
        kv_attention(torch.zeros(1, 3, 64), pages, batch, layout, 1.0)


def test_pages_for_counts_the_sink_page() -> None:
    assert [KVPageLayout(1, 64).pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [KVPageLayout(1, 64, num_sinks=4).pages_for(n) for n in (0, 1, 16, 17)] == [0, 2, 2, 3]
    assert KVPageLayout(8, 128).page_bytes == 8 * 16 * 136
