"""Decode steps as CUDA graphs: a whole model step is one launch, whatever its number of kernels.

A graph is captured for one batch size; a smaller batch runs in the next larger one, its empty slots marked by a context
length of 0. Everything that changes between steps (tokens, context lengths, pages) is read on the device from buffers
of fixed address, so a graph is captured once and serves every context length up to the width of its block table. On a
CPU there is nothing to capture: the same buffers, and the step runs when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from w4a4.serve.model import CausalLM, KVCache
from w4a4.serve.step_batches import DecodeBatch, counting


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256 and of 64 beyond, the last exact."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraph:
    """One captured decode step of `batch_size` sequences.

    Buffers that the caller fills before `replay`, on the device:
        input_ids int32 [B], context_lengths int32 [B] (the new token included; 0: an empty slot),
        sink_pages int32 [B] (`KVCache.sink_pages`), block_tables int32 [B, table_width]
    Results, overwritten by every replay: logits float32 [B, V]; next_tokens int32 [B] where `is_greedy`.

    Args:
        is_greedy: the step also takes the most probable token of each sequence, makes it the next input and lengthens
            the contexts by one, so that replays follow each other without the host.
        pool: memory pool shared with other graphs of which only one runs at a time.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        batch_size: int,
        table_width: int,
        is_greedy: bool = False,
        pool: Any = None,
    ) -> None:
        device = model.device
        self.batch_size = batch_size
        self.input_ids = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.context_lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.sink_pages = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(batch_size, table_width, dtype=torch.int32, device=device)
        self.next_tokens = self.input_ids if is_greedy else None

        self._model, self._cache = model, cache
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = self._captured(pool)

    def replay(self) -> Tensor:
        """Run the step on the current stream; returns `logits`."""
        if self._graph is None:
            self.logits = self._step()
        else:
            self._graph.replay()
        return self.logits

    @torch.inference_mode()
    def _step(self) -> Tensor:
        starts = counting(self.batch_size + 1, self._model.device)
        sink_pages = self.sink_pages if self._cache.layout.num_sinks else None
        batch = DecodeBatch(self.block_tables, starts, self.context_lengths, sink_pages)
        logits = self._model.logits(self._model.forward(self.input_ids, batch, self._cache))
        if self.next_tokens is None:
            return logits
        if logits.is_cuda:
            from w4a4.kernels.row_maxima import advance_greedily

            advance_greedily(logits, self.next_tokens, self.context_lengths)
        else:
            self.next_tokens.copy_(logits.argmax(-1))
            self.context_lengths += 1
        return logits

    def _captured(self, pool: Any) -> torch.cuda.CUDAGraph:
        device = self._model.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # A run before the capture compiles kernels and allocates workspaces. Slots are empty: nothing is written.
            self._step()
            self.context_lengths.zero_()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self.logits = self._step()
        self.context_lengths.zero_()
        return graph


class DecodeGraphs:
    """Graphs of several batch sizes over one cache, captured largest first into one memory pool."""

    def __init__(self, model: CausalLM, cache: KVCache, sizes: Sequence[int], table_width: int) -> None:
        self._sizes = sorted(sizes)
        is_gpu = model.device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if is_gpu else None
        graphs = [DecodeGraph(model, cache, size, table_width, pool=pool) for size in reversed(self._sizes)]
        self._graphs = graphs[::-1]
        self._first_sink_page = cache.num_pages
        # tokens, context lengths, sink pages, then tables: a step's indices travel in one copy
        words = self._sizes[-1] * (3 + table_width)
        self._host = torch.empty(words, dtype=torch.int32, pin_memory=is_gpu)
        self._staging = torch.empty(words, dtype=torch.int32, device=model.device)
        self._copied = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    @property
    def max_batch(self) -> int:
        return self._sizes[-1]

    def step(self, input_ids: Tensor, context_lengths: Tensor, sink_slots: Tensor, block_tables: Tensor) -> Tensor:
        """Logits float32 [B, V] of one decode step; arguments are CPU tensors as in `serve.runner.Batch`, but
        `input_ids` may be on the device.

        The result is valid until the next step.
        """
        num_seqs, width = block_tables.shape
        graph = self._graphs[bisect_left(self._sizes, num_seqs)]
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: long done
        words = num_seqs * (3 + width)
        host = self._host[:words]
        fields = host[: 3 * num_seqs].view(3, num_seqs)
        if input_ids.device == fields.device:
            fields[0] = input_ids
        fields[1], fields[2] = context_lengths, sink_slots + self._first_sink_page
        host[3 * num_seqs :].view(num_seqs, width).copy_(block_tables)
        staging = self._staging[:words]
        staging.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        own = staging[: 3 * num_seqs].view(3, num_seqs)
        graph.input_ids[:num_seqs].copy_(own[0] if input_ids.device == fields.device else input_ids)
        graph.context_lengths[:num_seqs].copy_(own[1])
        graph.sink_pages[:num_seqs].copy_(own[2])
        if num_seqs < graph.batch_size:
            graph.context_lengths[num_seqs:].zero_()
        graph.block_tables[:num_seqs, :width].copy_(staging[3 * num_seqs :].view(num_seqs, width))
        return graph.replay()[:num_seqs]
