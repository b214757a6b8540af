"""A batch of sequences of equal length, run as a benchmark wants it: prefill in one go, decode step after step.

Pages are handed out in random order and hold random entries before anything is measured, as after hours of service.
On a GPU decode is one CUDA graph per step that also takes the most probable token and feeds it back: the host only
replays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.kernels.kv4 import KVPageLayout
from w4a4.serve.cuda_graphs import DecodeGraph
from w4a4.serve.model import CausalLM, KVCache

PREFILL_TOKENS = 8192
"""New tokens of one prefill step on a GPU; on a CPU `CPU_PREFILL_TOKENS`."""
CPU_PREFILL_TOKENS = 512


class FixedBatch:
    """`batch` sequences with room for `max_tokens` tokens each."""

    def __init__(self, model: CausalLM, batch: int, max_tokens: int, seed: int = 0) -> None:
        self.model = model
        self.batch = batch
        self.max_tokens = max_tokens
        layout = model.kv_layout()
        width = -(-max_tokens // layout.page_size)
        self.cache = model.allocate_cache(batch * width, batch)
        generator = torch.Generator().manual_seed(seed)
        fill_random(self.cache, seed)
        pages = torch.randperm(batch * width, generator=generator).to(torch.int32)
        self.tables = pages.view(batch, width).to(model.device)
        self.sink_slots = torch.arange(batch, dtype=torch.int32, device=model.device)
        self.tokens = torch.randint(0, model.config.vocab_size, (batch, max_tokens), generator=generator).to(
            model.device
        )
        self._graph: DecodeGraph | None = None
        self._context = 0

    def prefill(self, num_tokens: int) -> Tensor:
        """Compute the first `num_tokens` tokens of every sequence; logits float32 [B, V] of the last ones."""
        at_once = PREFILL_TOKENS if self.model.device.type == "cuda" else CPU_PREFILL_TOKENS
        group = max(1, at_once // num_tokens)
        logits = [self._prefill(first, min(first + group, self.batch), num_tokens, at_once)
                  for first in range(0, self.batch, group)]  # fmt: skip
        return torch.cat(logits)

    def _prefill(self, first: int, last: int, num_tokens: int, at_once: int) -> Tensor:
        """Sequences first to last, a chunk at a time where one sequence alone is longer than a step."""
        hidden = None
        for start in range(0, num_tokens, at_once):
            stop = min(start + at_once, num_tokens)
            hidden = self._chunk(first, last, start, stop)
        assert hidden is not None
        ends = torch.arange(1, last - first + 1, device=hidden.device) * (hidden.shape[0] // (last - first)) - 1
        return self.model.logits(hidden[ends])

    def _chunk(self, first: int, last: int, start: int, stop: int) -> Tensor:
        count = last - first
        starts = [index * (stop - start) for index in range(count + 1)]
        tables, sinks = self.tables[first:last], self.sink_slots[first:last]
        batch = self.cache.known_batch(tables, starts, [stop] * count, sinks)
        return self.model.forward(self.tokens[first:last, start:stop].reshape(-1), batch, self.cache)

    def seek(self, context: int) -> None:
        """The next `decode` computes token number `context` (from 0) of every sequence: `context` are cached before."""
        if not 0 < context < self.max_tokens:
            raise ValueError(f"context must be 1 to {self.max_tokens - 1}, got {context}")
        self._context = context
        graph = self._captured()
        graph.context_lengths.fill_(context + 1)
        graph.input_ids.copy_(self.tokens[:, context])

    def decode(self, steps: int) -> Tensor:
        """That many greedy steps; logits float32 [B, V] of the last one, valid until the next."""
        if self._context + steps > self.max_tokens:
            raise ValueError(f"{steps} steps from {self._context} exceed the room of {self.max_tokens} tokens")
        self._context += steps
        graph = self._captured()
        for _ in range(steps):
            graph.replay()
        return graph.logits

    def _captured(self) -> DecodeGraph:
        if self._graph is None:
            graph = DecodeGraph(self.model, self.cache, self.batch, self.tables.shape[1], is_greedy=True)
            graph.block_tables.copy_(self.tables)
            sink_pages = self.cache.sink_pages(self.sink_slots)
            if sink_pages is not None:
                graph.sink_pages.copy_(sink_pages)
            self._graph = graph
        return self._graph


def fill_random(cache: KVCache, seed: int = 0) -> None:
    """Random but finite entries in every page: codes uniform, scales and zero points as of normal keys and values."""
    for index, pages in enumerate(cache.pages):
        generator = torch.Generator(pages.device).manual_seed(seed * 1000 + index)
        _fill(pages, cache.layout, cache.num_pages, generator)


def _fill(pages: Tensor, layout: KVPageLayout, num_pages: int, generator: torch.Generator) -> None:
    if layout.bits == 16:
        pages.view(layout.dtype).normal_(generator=generator)
        return
    pages.random_(0, 256, generator=generator)
    parameters = pages[:num_pages, :, layout.page_size * layout.head_dim :].view(torch.float16)
    parameters = parameters.view(*parameters.shape[:2], layout.page_size, 4)
    parameters[..., 0::2].uniform_(0.2, 0.4, generator=generator)  # a normal vector of 128 spans about 5 deviations
    parameters[..., 1::2].uniform_(-2.8, -2.2, generator=generator)
    pages[num_pages:, :, : 4 * layout.num_sinks * layout.head_dim].view(layout.dtype).normal_(generator=generator)
