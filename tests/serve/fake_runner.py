"""A language model that is a hash, for tests and benchmarks: exact, fast and sensitive to every page.

It stores token ids in the pages that it is told to write, and each answer depends on all the tokens of the sequence
as they are *read back* through the block table (the first four from the sink slot, if there are any). A page that is
shared wrongly, written twice, evicted while in use or listed in the wrong order changes the answer. `expected_answer`
says what a request gives when it is alone, without pages.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch
from torch import Tensor

from w4a4.serve.runner import Batch, LayerPlan, RunnerInfo

NUM_SINKS = 4


class FakeRunner:
    """See the module. `step_seconds` sleeps in every step as a device would; `fail_after` raises in that step."""

    def __init__(
        self,
        *,
        vocab_size: int = 300,
        num_pages: int = 64,
        page_size: int = 16,
        num_sink_slots: int = 0,
        max_model_len: int = 512,
        is_asynchronous: bool = False,
        step_seconds: float = 0.0,
        fail_after: int | None = None,
    ) -> None:
        self.info = RunnerInfo(
            num_pages=num_pages,
            page_size=page_size,
            num_sink_slots=num_sink_slots,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            path="fake",
            is_asynchronous=is_asynchronous,
        )
        self.step_seconds = step_seconds
        self.fail_after = fail_after
        self.nan_after: int | None = None
        self.num_steps = 0
        self.num_steps_ahead = 0  # of them, those whose tokens the host did not know
        self.max_batch = 0
        self.max_tokens = 0
        self.is_closed = False
        self.gate = threading.Event()
        self.gate.set()
        self._pages = np.full(num_pages * page_size, -1, dtype=np.int64)
        self._sinks = np.full((max(num_sink_slots, 1), NUM_SINKS), -1, dtype=np.int64)
        self._ids = np.arange(vocab_size, dtype=np.uint64)

    def step(self, batch: Batch) -> Tensor:
        self.gate.wait(30)
        self.num_steps += 1
        self.num_steps_ahead += batch.device_ids is not None
        self.max_batch = max(self.max_batch, batch.num_seqs)
        self.max_tokens = max(self.max_tokens, batch.num_tokens)
        if self.fail_after is not None and self.num_steps > self.fail_after:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        slots = batch.slot_mapping.numpy()
        ids = (batch.input_ids if batch.device_ids is None else batch.device_ids).numpy()
        positions = batch.positions.numpy()
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        self._pages[slots] = ids
        starts = batch.query_start.numpy()
        page_size = self.info.page_size
        rows = batch.logit_rows.tolist()
        logits = torch.empty(len(rows), self.info.vocab_size)
        contexts: dict[int, np.ndarray] = {}
        for sequence in range(batch.num_seqs):
            start, end = starts[sequence], starts[sequence + 1]
            assert (
                positions[start:end] == np.arange(end - start) + batch.context_lens[sequence].item() - (end - start)
            ).all()
            table = batch.block_tables[sequence].numpy()
            assert (
                slots[start:end]
                == table[positions[start:end] // page_size] * page_size + positions[start:end] % page_size
            ).all()
            if self.info.num_sink_slots:
                slot = int(batch.sink_slots[sequence])
                assert slot >= 0, "a sequence without a sink slot"
                is_sink = positions[start:end] < NUM_SINKS
                self._sinks[slot, positions[start:end][is_sink]] = ids[start:end][is_sink]
        sequences = np.searchsorted(starts, rows, side="right") - 1
        for index, (row, sequence) in enumerate(zip(rows, sequences.tolist(), strict=True)):
            if sequence not in contexts:
                length = int(batch.context_lens[sequence])
                table = batch.block_tables[sequence].numpy()
                where = (table[:, None].astype(np.int64) * page_size + np.arange(page_size)).ravel()[:length]
                contexts[sequence] = self._pages[where]
                if self.info.num_sink_slots:
                    num_sinks = min(NUM_SINKS, length)
                    contexts[sequence][:num_sinks] = self._sinks[int(batch.sink_slots[sequence]), :num_sinks]
            logits[index] = self.logits(contexts[sequence][: positions[row] + 1])
        if self.nan_after is not None and self.num_steps > self.nan_after:
            logits[0, 5] = float("nan")
        return logits

    def logits(self, tokens: np.ndarray) -> Tensor:
        """float32 [V]: a function of all tokens and their order."""
        weights = np.arange(1, len(tokens) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * (weights | np.uint64(1))
        mixed ^= mixed >> np.uint64(29)
        state = int((mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64))
        values = (self._ids + np.uint64(state & 0xFFFFFFFF)) * np.uint64(0xD1342543DE82EF95 ^ (state >> 7 & ~1))
        values ^= values >> np.uint64(32)
        values *= np.uint64(0xDA942042E4DD58B5)
        return torch.from_numpy((values >> np.uint64(40)).astype(np.float32) / 2**21)

    def expected_answer(
        self, prompt: list[int] | tuple[int, ...], num_tokens: int, stop_ids: frozenset[int] = frozenset()
    ) -> list[int]:
        """The greedy answer to a prompt given alone."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            tokens.append(int(self.logits(np.array(tokens)).argmax()))
            if tokens[-1] in stop_ids:
                break
        return tokens[len(prompt) :]

    def explain(self) -> list[LayerPlan]:
        return [LayerPlan("model.layers.0.self_attn.q_proj", "64 x 64", "4", "4", "fake")]

    def close(self) -> None:
        self.is_closed = True
