"""Tokens per second of a packed model: prefill of a prompt, and decoding behind it.

Every run takes fresh random tokens, so nothing is cached and no token repeats; the first run warms up and is not
counted. Device work is waited for before a clock is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.serve.model import PAGE_SIZE, CausalLM, KVCache

CHUNK = 2048  # prompt tokens in one forward pass


@dataclass(frozen=True)
class Speed:
    """One line of the table: `test` is "pp1024" (prefill) or "tg128@1024" (decode behind that many tokens).

    `seconds` are the whole test's, one per counted run; `tokens` are those of all sequences of a run together.
    """

    test: str
    batch: int
    tokens: int
    steps: int
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """At the median run."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the fastest and the slowest run, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / statistics.median(self.seconds)

    @property
    def milliseconds_per_step(self) -> float:
        return 1000 * statistics.median(self.seconds) / self.steps


class _Sequences:
    """A batch of sequences that grow together in pages of their own."""

    def __init__(self, model: CausalLM, batch: int, length: int) -> None:
        self.model = model
        num_pages = -(-length // PAGE_SIZE)
        self.cache: KVCache = model.allocate_cache(batch * num_pages, batch)
        pages = torch.arange(batch * num_pages, dtype=torch.int32, device=model.device)
        self.tables = pages.view(batch, num_pages)
        self.sinks = torch.arange(batch, dtype=torch.int32, device=model.device)
        self.length = 0

    def extend(self, ids: Tensor) -> Tensor:
        """Run int64 [B, t] further tokens of every sequence: logits f32 [B, V] behind the last."""
        batch, count = ids.shape
        device = self.model.device
        self.length += count
        starts = torch.arange(0, batch * count + 1, count, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), self.length, dtype=torch.int32, device=device)
        indices = self.cache.batch(self.tables, starts, lengths, self.sinks)
        hidden = self.model.forward(ids.reshape(-1), indices, self.cache)
        return self.model.logits(hidden[starts[1:].long() - 1])

    def prefill(self, ids: Tensor) -> Tensor:
        """`extend` in chunks of at most CHUNK tokens of all sequences together."""
        step = max(1, CHUNK // ids.shape[0])
        logits = None
        for start in range(0, ids.shape[1], step):
            logits = self.extend(ids[:, start : start + step])
        assert logits is not None
        return logits


def measure(
    model: CausalLM,
    seq: int,
    gen: int,
    batch: int,
    repeat: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Speed]:
    """Prefill `batch` prompts of `seq` tokens, then decode `gen` tokens greedily, `repeat` times after a warm-up.

    Raises:
        UsageError: the sequence does not fit the model's positions.
        NumericsError: logits that are not finite.
    """
    limit = model.config.max_position_embeddings
    if seq + gen > limit:
        raise UsageError(f"{seq} + {gen} tokens exceed the model's {limit} positions", "lower --seq or --gen")
    generator = torch.Generator().manual_seed(seed)
    prefill_seconds, decode_seconds = [], []
    for run in range(repeat + 1):
        ids = torch.randint(model.config.vocab_size, (batch, seq), generator=generator).to(model.device)
        sequences = _Sequences(model, batch, seq + gen)
        begin = _now(model.device)
        logits = sequences.prefill(ids)
        middle = _now(model.device)
        for _ in range(gen):
            logits = sequences.extend(logits.argmax(-1, keepdim=True))
        end = _now(model.device)
        if not bool(logits.isfinite().all()):
            raise NumericsError(f"logits are not finite after {seq + gen} random tokens", "w4a4 verify DIR")
        if run:
            prefill_seconds.append(middle - begin)
            decode_seconds.append(end - middle)
        if progress is not None:
            progress(run + 1, repeat + 1)
    chunks = -(-seq // max(1, CHUNK // batch))
    speeds = [Speed(f"pp{seq}", batch, batch * seq, chunks, tuple(prefill_seconds))]
    if gen:
        speeds.append(Speed(f"tg{gen}@{seq}", batch, batch * gen, gen, tuple(decode_seconds)))
    return speeds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
