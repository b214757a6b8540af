"""Which tokens run in the next step. One budget per step mixes decoding with chunks of prompts.

Policy: first come, first served. Sequences that decode go first, one token each, so a long prompt never stalls them;
what is left of the budget goes to prompts in order of arrival, a chunk at a time. When pages run out the latest
arrival is preempted: its pages are given back, it returns to the head of the queue with everything it has answered so
far, and its K and V are recomputed later (what is still in the prefix cache is not). The oldest sequence is never
preempted for another, and any single one fits in the pool, so every request gets done.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from w4a4.configs.errors import UsageError
from w4a4.serve.batches import BlockTables
from w4a4.serve.pages import ROOT_DIGEST, PagePool, chain_digest
from w4a4.serve.request import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_seqs` sequences run at once; a step has at most `max_num_batched_tokens` new tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_model_len < 1:
            raise UsageError(
                f"max_num_seqs {self.max_num_seqs} and max_model_len {self.max_model_len} must be positive"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}",
                hint="every running sequence needs one token per step: raise the one or lower the other",
            )


class Scheduled(NamedTuple):
    """One sequence's share of a step: its tokens num_computed .. num_computed + num_tokens - 1.

    `is_sampled`: the step reaches the sequence's last token, so a next one follows.
    """

    sequence: Sequence
    num_tokens: int
    is_sampled: bool


class Admission(Enum):
    """What came of trying to run a waiting sequence: it runs, it needs pages that another computes, or there is no
    room.
    """

    DONE = auto()
    LATER = auto()
    NO_ROOM = auto()


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    def __init__(self, pool: PagePool, limits: SchedulerLimits) -> None:
        if pool.num_pages * pool.page_size < limits.max_model_len:
            raise UsageError(
                f"a pool of {pool.num_pages} pages of {pool.page_size} tokens cannot hold one sequence of "
                f"{limits.max_model_len} tokens",
                hint="lower --max-model-len",
            )
        if 0 < pool.num_sink_slots < limits.max_num_seqs:
            raise UsageError(f"{pool.num_sink_slots} sink slots are fewer than max_num_seqs {limits.max_num_seqs}")
        self.pool = pool
        self.limits = limits
        self.tables = BlockTables(limits.max_num_seqs, -(-limits.max_model_len // pool.page_size))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # both in order of arrival
        self._computing: dict[bytes, Sequence] = {}  # full pages that running sequences have yet to compute
        self._num_arrived = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up in the prefix cache
        self.num_prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt and answer together are at most max_model_len tokens."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """Plan the next step and take the pages it needs. Empty only if there is no work, but for last tokens that the
        host has yet to see (`Sequence.is_ending`).
        """
        budget = self.limits.max_num_batched_tokens
        plan: dict[int, Scheduled] = {}
        num_preempted = self.num_preemptions
        # Decoding first. Both lists keep the order of arrival; a victim may be in either, so rows are checked again.
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1 and not sequence.is_ending]
        for sequence in decoding:
            if sequence.row >= 0 and self._reserve(sequence, 1, plan):
                plan[sequence.row] = Scheduled(sequence, 1, True)
        if len(decoding) < len(self.running):
            for sequence in [sequence for sequence in self.running if sequence.num_pending > 1]:
                num_tokens = min(sequence.num_pending, budget - sum(entry.num_tokens for entry in plan.values()))
                if sequence.row >= 0 and num_tokens > 0 and self._reserve(sequence, num_tokens, plan):
                    plan[sequence.row] = Scheduled(sequence, num_tokens, num_tokens == sequence.num_pending)
        budget -= sum(entry.num_tokens for entry in plan.values())
        if self.num_preemptions == num_preempted:
            index = 0
            while index < len(self.waiting) and budget and len(self.running) < self.limits.max_num_seqs:
                sequence = self.waiting[index]
                admission = self._admit(sequence)
                if admission is Admission.NO_ROOM:
                    break
                if admission is Admission.LATER:
                    index += 1
                    continue
                del self.waiting[index]
                num_tokens = min(sequence.num_pending, budget)
                plan[sequence.row] = Scheduled(sequence, num_tokens, num_tokens == sequence.num_pending)
                budget -= num_tokens
        return list(plan.values())

    def commit(self, plan: Iterable[Scheduled]) -> None:
        """The step has run: the planned tokens have their K and V, and pages that became full are known from now on."""
        page_size = self.pool.page_size
        for entry in plan:
            sequence = entry.sequence
            if sequence.row < 0:
                continue  # finished or aborted while the step ran
            before = sequence.num_computed
            sequence.num_computed = after = before + entry.num_tokens
            if after % page_size < entry.num_tokens and self.pool.is_caching:
                for index in range(before // page_size, after // page_size):
                    digest = self._digests(sequence, index + 1)[index]
                    self.pool.register(sequence.pages[index], digest)
                    if self._computing.get(digest) is sequence:
                        del self._computing[digest]

    def remove(self, sequence: Sequence) -> None:
        """The sequence is finished or aborted: free what it holds. Does nothing if it holds nothing."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the sequence's first `count` full pages."""
        digests = sequence.page_digests
        page_size = self.pool.page_size
        while len(digests) < count:
            start = len(digests) * page_size
            parent = digests[-1] if digests else ROOT_DIGEST
            digests.append(chain_digest(parent, sequence.tokens[start : start + page_size]))
        return digests

    def _admit(self, sequence: Sequence) -> Admission:
        """Take a waiting sequence into the running ones if the pages for all its tokens are there."""
        pool = self.pool
        num_needed = -(-len(sequence.tokens) // pool.page_size)
        matched: list[int] = []
        num_lookup = 0
        # The last token is always computed, for its logits; with prompt log-probabilities every token is.
        if pool.is_caching and (sequence.request.params.prompt_logprobs is None or sequence.num_output):
            num_lookup = (len(sequence.tokens) - 1) // pool.page_size
            matched = pool.match(self._digests(sequence, num_lookup)[:num_lookup])
            if len(matched) < num_lookup and sequence.page_digests[len(matched)] in self._computing:
                pool.release(matched)
                return Admission.LATER
        # A page of margin per running sequence, so that the newcomer is not preempted at the next page boundary.
        if pool.num_available < num_needed - len(matched) + len(self.running) and (
            self.running or pool.num_available < num_needed - len(matched)
        ):
            pool.release(matched)
            return Admission.NO_ROOM
        num_matched = len(matched)
        sequence.num_computed = num_matched * pool.page_size
        sequence.pages = matched
        sequence.row = self.tables.take_row()
        self.tables.write(sequence.row, 0, matched)
        while len(sequence.pages) < num_needed:
            self._grow(sequence)
        sequence.sink_slot = pool.sink_slot(sequence.pages[0])
        insort(self.running, sequence, key=_arrival)
        if pool.is_caching:
            num_full = len(sequence.tokens) // pool.page_size
            for digest in self._digests(sequence, num_full)[num_matched:num_full]:
                self._computing.setdefault(digest, sequence)
        self.num_prefix_queries += num_lookup * pool.page_size
        self.num_prefix_hits += sequence.num_computed
        if not sequence.times.scheduled:
            sequence.times.scheduled = time.monotonic()
            sequence.num_cached = sequence.num_computed
        return Admission.DONE

    def _reserve(self, sequence: Sequence, num_tokens: int, plan: dict[int, Scheduled]) -> bool:
        """Get the pages for the next `num_tokens`, preempting later arrivals if need be; False if it went itself."""
        num_missing = -(-(sequence.num_computed + num_tokens) // self.pool.page_size) - len(sequence.pages)
        if num_missing <= 0:
            return True
        while num_missing > self.pool.num_available:
            victim = self.running[-1]
            plan.pop(victim.row, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        for _ in range(num_missing):
            self._grow(sequence)
        return True

    def _grow(self, sequence: Sequence) -> None:
        page = self.pool.allocate(is_first=not sequence.pages)
        self.tables.write(sequence.row, len(sequence.pages), [page])
        sequence.pages.append(page)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        index = 0  # it is older than most that wait, but not than one that waits for the pages of another
        while index < len(self.waiting) and self.waiting[index].arrival < sequence.arrival:
            index += 1
        self.waiting.insert(index, sequence)

    def _free(self, sequence: Sequence) -> None:
        if sequence.num_computed < len(sequence.page_digests) * self.pool.page_size:
            for digest in sequence.page_digests:
                if self._computing.get(digest) is sequence:
                    del self._computing[digest]
        self.pool.release(sequence.pages)
        self.tables.free_row(sequence.row)
        sequence.pages = []
        sequence.sink_slot = -1
        sequence.num_computed = 0
        sequence.row = -1
