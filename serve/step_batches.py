"""KV batches that say more than `KVBatch` does, so that a step on a GPU never waits to learn its own shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from w4a4.kernels.kv4 import KVBatch


@cache
def counting(count: int, device: torch.device) -> Tensor:
    """int32 0 to count - 1: made once for all steps, so that a captured step need not."""
    return torch.arange(count, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class DecodeBatch(KVBatch):
    """A step in which every sequence has one new token: its indices are computed on the device, without a wait."""

    @cached_property
    def rows(self) -> Tensor:
        return torch.arange(self.context_lengths.shape[0], device=self.context_lengths.device)

    @cached_property
    def positions(self) -> Tensor:
        return self.context_lengths.long() - 1


@dataclass(frozen=True)
class KnownBatch(KVBatch):
    """A step whose query_start and context_lengths the host has as numbers, `known`."""

    known: tuple[list[int], list[int]] = ([0], [])

    @cached_property
    def on_host(self) -> tuple[list[int], list[int]]:
        return self.known

    @cached_property
    def rows(self) -> Tensor:
        lengths = self.query_start.diff().long()
        index = torch.arange(lengths.shape[0], device=lengths.device)
        return index.repeat_interleave(lengths, output_size=self.known[0][-1])
