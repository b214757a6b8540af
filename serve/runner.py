"""The seam between the engine and the model: what goes in at each step and what comes out.

The engine hands indices, the runner owns tensors: weights, KV pages and sink slots live on its side, and it alone knows
the device. Layout of a step: the new tokens of all sequences one after the other, as in vLLM's flat batches, sequence
b owning rows query_start[b] .. query_start[b + 1] - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work for B sequences and T new tokens. All tensors but `device_ids` are CPU tensors; the runner copies
    what it needs.

    The K and V of token t are written to slot `slot_mapping[t]` = page * page_size + offset, before any query
    attends. Query t of sequence b sees the positions 0 .. positions[t] of that sequence: position p stands in page
    `block_tables[b, p // page_size]` at offset p % page_size, and, where the runner keeps sinks in 16 bit, the first
    positions stand in sink slot `sink_slots[b]` as well (with `kv4.KVBatch`: sink_pages = num_pages + sink_slots, the
    slots being extra pages behind those that the engine knows). Entries of `block_tables` beyond a sequence's pages
    are 0.
    """

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    query_start: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B], this step's tokens included
    block_tables: Tensor  # int32 [B, W], W = pages of the longest sequence
    sink_slots: Tensor  # int32 [B]; -1 where the runner has no sinks
    logit_rows: Tensor  # int64 [R], ascending indices into T
    device_ids: Tensor | None = None  # int64 [T] on the runner's device; where given, `input_ids` are not read

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one new token: the shape CUDA graphs are captured for."""
        return self.input_ids.shape[0] == self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What `--explain` prints for one linear layer: the bits and the kernel that will really run."""

    name: str
    shape: str
    weight_bits: str
    act_bits: str
    kernel: str


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner is: sizes that the scheduler needs, and how it computes, in words for people.

    `num_sink_slots` is 0 where the checkpoint keeps no sinks in 16 bit, else at least the number of sequences that run
    at once. `is_asynchronous`: `step` returns before the device is done, so the engine emits text meanwhile.
    """

    num_pages: int
    page_size: int
    num_sink_slots: int
    vocab_size: int
    max_model_len: int
    device: str = "cpu"
    path: str = "reference"
    is_asynchronous: bool = False


class Runner(Protocol):
    """A model with its pages. Calls come from one thread only."""

    @property
    def info(self) -> RunnerInfo: ...

    def step(self, batch: Batch) -> Tensor:
        """Run one step and return float32 logits [R, vocab_size] for `batch.logit_rows`, on the runner's device.

        The sampler may write into the result. Any exception means that the device state is unknown: the engine fails
        every request and stops.
        """
        ...

    def explain(self) -> list[LayerPlan]: ...

    def close(self) -> None:
        """Free the device memory. The runner is not used afterwards."""
        ...
