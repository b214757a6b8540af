"""The engine: a thread that turns requests into tokens. It knows no HTTP, the server knows no tensors.

Four doors: `submit` and `abort` from any thread, `stats` for a look, and a listener that is called from the engine's
thread once per step with everything that is new. One step: take orders, schedule, run the model, sample, update
sequences, hand out text. With a runner that returns before its device is done, the host runs one step ahead: a step is
launched with tokens that only the device knows yet, and the tokens and the text of the step before it are dealt with
while the device works. A sequence that turns out to have ended has then been computed once more, for nothing; one whose
number of tokens is reached is left out. A step that samples something the host must see first (a grammar, penalties,
log-probabilities) waits.

A failure of the runner leaves the device in an unknown state, so it ends the engine: every request gets an error,
nothing new is taken, and `failure` says why. A failure that belongs to one request (its logits are not finite, its
grammar does not accept a token) ends that request alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from w4a4.configs.errors import NumericsError, W4A4Error
from w4a4.serve.batches import build_batch
from w4a4.serve.detokenizer import Detokenizer
from w4a4.serve.pages import PagePool
from w4a4.serve.request import FinishReason, Output, Request, Sequence, TokenLogprob
from w4a4.serve.runner import Batch, Runner
from w4a4.serve.sampler import PendingTokens, Sampled, Sampler, gather_logprobs, on_device
from w4a4.serve.scheduler import Scheduled, Scheduler, SchedulerLimits

logger = logging.getLogger("w4a4.serve.engine")

Listener = Callable[[list[Output]], None]
DecodeTokens = Callable[[list[int], bool], str]  # token ids, whether to leave out special tokens


class QueueFullError(W4A4Error):
    """As many requests wait as may wait: come back later."""


class EngineStoppedError(W4A4Error):
    """The engine has failed or is shutting down and takes no more requests."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_queued` requests may wait beyond the `max_num_seqs` that run. `seed` fixes the draws of requests without
    one.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_queued: int = 1024
    is_prefix_caching: bool = True
    eos_ids: frozenset[int] = frozenset()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent look at the engine after its last step. Token and preemption counts are totals since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_in_use: int = 0
    num_pages_cached: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    busy_seconds: float = 0.0  # time with work
    runner_seconds: float = 0.0  # of that, inside the runner


class _News(NamedTuple):
    """A sequence's tokens of a step whose text has not been made yet."""

    sequence: Sequence
    token: int | None
    logprob: TokenLogprob | None
    is_prompt_done: bool


class _Ahead(NamedTuple):
    """A step whose tokens the host has not seen: its sequences in the order of their rows."""

    sequences: list[Sequence]
    pending: PendingTokens


class Engine:
    """Runs requests on a runner until `shutdown`.

    Args:
        runner: the model; the engine's thread alone calls it from `start` on, and `shutdown` closes it.
        decode: token ids to text.
        listener: gets each step's outputs, in the engine's thread. It must be quick and must not raise.
    """

    def __init__(self, runner: Runner, decode: DecodeTokens, config: EngineConfig, listener: Listener) -> None:
        info = runner.info
        self.config = config
        self.info = info
        self.failure: BaseException | None = None
        # An end of text beyond the vocabulary (a tokenizer with more tokens than the model) cannot be sampled.
        self._eos_ids = frozenset(token_id for token_id in config.eos_ids if token_id < info.vocab_size)
        self._runner = runner
        self._decode = decode
        self._listener = listener
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, info.max_model_len)
        pool = PagePool(info.num_pages, info.page_size, info.num_sink_slots, is_caching=config.is_prefix_caching)
        self._scheduler = Scheduler(pool, limits)
        self._sampler = Sampler(info.vocab_size, config.seed)
        self._sequences: dict[str, Sequence] = {}  # the engine thread's
        self._ahead: _Ahead | None = None
        self._news: list[_News] = []
        self._finished: list[Sequence] = []
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._busy_seconds = 0.0
        self._runner_seconds = 0.0
        self._stats = EngineStats(num_pages=info.num_pages)

        self._wake = threading.Condition()  # guards everything below
        self._submitted: deque[Sequence] = deque()
        self._aborted: deque[tuple[str | None, str]] = deque()
        self._live: set[str] = set()
        self._is_draining = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="w4a4-engine", daemon=True)

    # The doors. Any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, all or none.

        Raises ValueError (empty or too long prompt, unknown token id, id in use), QueueFullError, EngineStoppedError.
        """
        sequences = [self._sequence(request) for request in requests]
        ids = {sequence.request.request_id for sequence in sequences}
        with self._wake:
            if self.failure is not None:
                raise EngineStoppedError(f"the engine has failed: {self.failure}")
            if self._is_draining or self._is_stopping:
                raise EngineStoppedError("the server is shutting down")
            if len(ids) < len(sequences) or not ids.isdisjoint(self._live):
                raise ValueError(f"request ids must be unique, got {sorted(ids)}")
            limit = self.config.max_num_seqs + self.config.max_queued
            if len(self._live) + len(sequences) > limit:
                raise QueueFullError(
                    f"{len(self._live)} requests are running or waiting, at most {limit} may",
                    hint="retry later, or raise --max-queued",
                )
            self._live |= ids
            self._submitted.extend(sequences)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request early and free its pages; no output follows but, at most, one already on its way.

        Unknown ids are ignored: the request may just have finished.
        """
        with self._wake:
            self._aborted.append((request_id, ""))
            self._wake.notify()

    def abort_all(self, reason: str) -> None:
        """End every request; each gets a last output with finish_reason `abort` and the reason."""
        with self._wake:
            self._aborted.append((None, reason))
            self._wake.notify()

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_live(self) -> int:
        """Requests submitted and not finished."""
        return len(self._live)

    @property
    def is_alive(self) -> bool:
        """Started, not failed and not shut down."""
        return self._thread.is_alive() and self.failure is None and not self._is_stopping

    def drain(self) -> None:
        """Take no more requests; those that are there go on."""
        with self._wake:
            self._is_draining = True

    def shutdown(self, timeout: float = 60.0) -> None:
        """Abort what is left, stop the thread and close the runner."""
        self.abort_all("the engine was shut down")
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise W4A4Error(f"the engine's thread did not stop within {timeout:g} s: the runner hangs")
        self._runner.close()

    # The engine's thread.

    def _sequence(self, request: Request) -> Sequence:
        params = request.params
        num_prompt = len(request.prompt_ids)
        longest = self.info.max_model_len
        if num_prompt == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        num_least = max(params.min_tokens, 1 if params.max_tokens != 0 else 0)
        if params.max_tokens is not None and num_prompt + params.max_tokens > longest:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}; this model takes {longest} "
                "of both together"
            )
        if num_prompt + num_least > longest:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, this model takes {longest} of prompt and answer together, and at "
                f"least {num_least} must be left for the answer"
            )
        highest = max(request.prompt_ids)
        lowest = min(request.prompt_ids)
        if lowest < 0 or highest >= self.info.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.info.vocab_size}")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < self.info.vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is not in the vocabulary of {self.info.vocab_size}")
        if request.grammar is not None and (params.min_tokens or params.ignore_eos):
            raise ValueError(
                "response_format cannot be combined with min_tokens or ignore_eos: the grammar decides the end"
            )
        skips_special = params.skip_special_tokens
        return Sequence(
            request=request,
            max_tokens=longest - num_prompt if params.max_tokens is None else params.max_tokens,
            stop_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_ids),
            detokenizer=Detokenizer(
                lambda ids: self._decode(list(ids), skips_special),
                request.prompt_ids,
                params.stop,
                include_stop=params.include_stop,
                min_tokens=params.min_tokens,
            ),
        )

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_orders():
                    start = time.perf_counter()
                    self.step()
                    self._busy_seconds += time.perf_counter() - start
        except BaseException as error:  # noqa: BLE001 - whatever it is, the requests must hear of it
            self._fail(error)

    def _take_orders(self) -> bool:
        """Wait for work, take submissions and aborts; False when it is time to stop."""
        with self._wake:
            while not (self._submitted or self._aborted or self._scheduler.has_work or self._is_stopping):
                self._wake.wait()
            submitted = list(self._submitted)
            aborted = list(self._aborted)
            self._submitted.clear()
            self._aborted.clear()
            is_stopping = self._is_stopping
        for sequence in submitted:
            self._sequences[sequence.request.request_id] = sequence
            self._scheduler.add(sequence)
        if aborted:
            self._settle()
            self._emit()  # nothing of an aborted request is left on its way
            outputs: list[Output] = []
            for request_id, reason in aborted:
                for key in [request_id] if request_id is not None else list(self._sequences):
                    target = self._sequences.get(key)
                    if target is None or target.is_finished:
                        continue
                    self._finish(target, FinishReason.ABORT, error=reason)
                    if request_id is None:
                        outputs.append(self._output(target, "", []))
            self._publish(outputs)
        return not is_stopping

    def step(self) -> None:
        """One step for whatever there is to do."""
        plan = self._scheduler.schedule()
        if not plan:
            assert self._ahead or not self._scheduler.has_work, "the scheduler has work and plans none of it"
            self._settle()
            self._emit()
            return
        batch, num_logit_rows = build_batch(plan, self._scheduler.tables, self.info.page_size)
        if self._ahead is not None:
            batch = replace(batch, device_ids=_device_ids(batch, self._ahead, plan))
        start = time.perf_counter()
        logits = self._runner.step(batch)
        if logits.shape != (batch.logit_rows.shape[0], self.info.vocab_size):
            raise RuntimeError(f"the runner returned {tuple(logits.shape)} logits for {batch.logit_rows.shape[0]} rows")
        self._settle()
        if self.info.is_asynchronous and all(map(_can_run_ahead, plan)):
            sequences = [entry.sequence for entry in plan if entry.is_sampled]  # perhaps none: then only time is kept
            self._ahead = _Ahead(sequences, self._sampler.sample_later(logits, sequences))
            self._runner_seconds += time.perf_counter() - start
            self._scheduler.commit(plan)
            for sequence in sequences:
                sequence.num_ahead = int(not sequence.is_finished)
            self._num_steps += 1
            self._emit()
            return
        if self.info.is_asynchronous:
            self._emit()  # the text of the step before, while the device works
        sampled = self._sample(plan, logits, num_logit_rows)
        self._runner_seconds += time.perf_counter() - start
        self._scheduler.commit(plan)
        self._num_steps += 1
        self._append(sampled)
        if not self.info.is_asynchronous or not self._scheduler.has_work:
            self._emit()

    def _settle(self) -> None:
        """Wait for the tokens of the step that ran ahead, if any, and add them to their sequences."""
        if self._ahead is None:
            return
        sequences, pending = self._ahead
        self._ahead = None
        pairs = list(zip(sequences, pending.results(), strict=True))
        for sequence in sequences:
            sequence.num_ahead = 0
        self._append([pair for pair in pairs if not pair[0].is_finished])

    def _sample(
        self, plan: list[Scheduled], logits: torch.Tensor, num_logit_rows: list[int]
    ) -> list[tuple[Sequence, Sampled | None]]:
        """Prompt log-probabilities into their sequences, and a next token for each that reached its end (None: no
        wish).
        """
        rows: list[int] = []
        sequences: list[Sequence] = []
        done: list[tuple[Sequence, Sampled | None]] = []
        first = 0
        for entry, num_rows in zip(plan, num_logit_rows, strict=True):
            sequence = entry.sequence
            first += num_rows
            if sequence.is_finished:
                continue  # by a stop string, while the step ran
            if num_rows > entry.is_sampled:
                self._add_prompt_logprobs(sequence, logits[first - num_rows : first - entry.is_sampled])
            if not entry.is_sampled:
                continue
            if sequence.max_tokens:
                rows.append(first - 1)
                sequences.append(sequence)
            else:
                done.append((sequence, None))
        if rows:
            if len(rows) < logits.shape[0]:
                logits = logits[torch.tensor(rows, device=logits.device)]
            done += zip(sequences, self._sampler.sample(logits, sequences), strict=True)
        return done

    def _add_prompt_logprobs(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """`logits` [R, V] are those of the R prompt tokens after the ones whose log-probabilities are known."""
        known = len(sequence.prompt_logprobs) + 1
        tokens = sequence.tokens[known : known + logits.shape[0]]
        tops = [sequence.request.params.prompt_logprobs or 0] * logits.shape[0]
        sequence.prompt_logprobs += gather_logprobs(torch.log_softmax(logits, dim=-1), tokens, tops)

    def _append(self, sampled: list[tuple[Sequence, Sampled | None]]) -> None:
        """Add the new tokens to their sequences and decide who is done, as far as tokens alone tell."""
        now = time.monotonic()
        for sequence, result in sampled:
            is_first = sequence.num_output == 0
            if is_first:
                self._num_prompt_tokens += sequence.num_prompt
                sequence.times.first_token = now
            if result is None:  # only the prompt's log-probabilities were wanted
                self._finish(sequence, FinishReason.LENGTH)
                self._news.append(_News(sequence, None, None, True))
                continue
            token = result.token
            if not result.is_finite:
                error = NumericsError(f"the model's logits are not finite after {len(sequence.tokens)} tokens")
                self._finish(sequence, FinishReason.ERROR, error=error.message)
                self._news.append(_News(sequence, None, None, False))
                continue
            sequence.tokens.append(token)
            self._num_output_tokens += 1
            num_output = len(sequence.tokens) - sequence.num_prompt
            grammar = sequence.request.grammar
            if grammar is not None and not grammar.accept(token):
                self._finish(sequence, FinishReason.ERROR, error="the grammar does not accept the sampled token")
            elif token in sequence.stop_ids and num_output >= sequence.request.params.min_tokens:
                sequence.stop_reason = token if token in sequence.request.params.stop_token_ids else None
                self._finish(sequence, FinishReason.STOP)
            elif grammar is not None and grammar.is_done:
                self._finish(sequence, FinishReason.STOP)
            elif num_output >= sequence.max_tokens:
                self._finish(sequence, FinishReason.LENGTH)
            self._news.append(_News(sequence, token, result.logprob, is_first))

    def _emit(self) -> None:
        """Make the text of what was appended, look for stop strings, and tell the listener."""
        outputs: list[Output] = []
        for sequence, token, logprob, is_prompt_done in self._news:
            is_last = sequence.finish_reason is not None
            detokenizer = sequence.detokenizer
            is_hidden = is_last and sequence.finish_reason is FinishReason.STOP and token in sequence.stop_ids
            text = detokenizer.push(None if is_hidden else token, is_last=is_last)
            if detokenizer.stop_reason is not None:
                sequence.stop_reason = detokenizer.stop_reason
                if is_last:
                    sequence.finish_reason = FinishReason.STOP
                else:
                    self._finish(sequence, FinishReason.STOP)
            output = self._output(sequence, text, [] if token is None else [token])
            if logprob is not None:
                output.logprobs.append(logprob)
            if is_prompt_done and sequence.request.params.prompt_logprobs is not None:
                output.prompt_logprobs = sequence.prompt_logprobs
            outputs.append(output)
        self._news.clear()
        self._publish(outputs)

    def _output(self, sequence: Sequence, text: str, token_ids: list[int]) -> Output:
        return Output(  # by position: one per sequence and step
            sequence.request.request_id,
            text,
            token_ids,
            [],
            sequence.num_prompt,
            sequence.num_output,
            sequence.num_cached,
            None,
            sequence.finish_reason,
            sequence.stop_reason,
            sequence.error,
            sequence.times,
        )

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Mark a sequence as done and free what it holds. Its last output may still be on its way."""
        if sequence.is_finished:
            return
        sequence.finish_reason = reason
        sequence.error = error
        sequence.times.finished = time.monotonic()
        self._scheduler.remove(sequence)
        self._finished.append(sequence)

    def _publish(self, outputs: list[Output]) -> None:
        """Drop the finished sequences, refresh the stats, then tell the listener: who hears of an end finds it done.

        Called when no text is waiting to be made.
        """
        scheduler = self._scheduler
        if self._finished:
            finished = [sequence.request.request_id for sequence in self._finished]
            self._finished.clear()
            for request_id in finished:
                del self._sequences[request_id]
            with self._wake:
                self._live.difference_update(finished)
        self._stats = EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=scheduler.pool.num_pages,
            num_pages_in_use=scheduler.pool.num_in_use,
            num_pages_cached=scheduler.pool.num_cached,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            busy_seconds=self._busy_seconds,
            runner_seconds=self._runner_seconds,
        )
        if outputs:
            self._listener(outputs)

    def _fail(self, error: BaseException) -> None:
        """The engine's end: tell every request."""
        logger.critical("the engine failed: %s", error)
        logger.debug("where it failed", exc_info=error)
        with self._wake:
            self.failure = error
            waiting = list(self._submitted)
            self._submitted.clear()
            self._live.clear()
        outputs: list[Output] = []
        for sequence in [*self._sequences.values(), *waiting]:
            if not sequence.is_finished or any(news.sequence is sequence for news in self._news):
                sequence.finish_reason = FinishReason.ERROR
                sequence.error = f"the engine failed: {error}"
                sequence.times.finished = time.monotonic()
                outputs.append(self._output(sequence, "", []))
        self._sequences.clear()
        self._news.clear()
        self._listener(outputs)


def _can_run_ahead(entry: Scheduled) -> bool:
    """Whether the next step can do without the host's knowledge of what this one says about a sequence."""
    sequence = entry.sequence
    params = sequence.request.params
    return params.prompt_logprobs is None and (
        not entry.is_sampled
        or sequence.is_finished
        or (sequence.is_plain and params.logprobs is None and sequence.max_tokens > 0)
    )


def _device_ids(batch: Batch, ahead: _Ahead, plan: list[Scheduled]) -> torch.Tensor:
    """The step's input ids on the device, int64 [T]: those that the host knows, and those of a step that ran ahead."""
    tokens = ahead.pending.tokens
    if batch.is_decode and [entry.sequence for entry in plan] == ahead.sequences:
        return tokens
    places = {id(sequence): place for place, sequence in enumerate(ahead.sequences)}
    pairs = [
        (row, places[id(entry.sequence)])
        for row, entry in zip(batch.query_start.tolist(), plan, strict=False)
        if entry.sequence.num_ahead
    ]
    ids = on_device(batch.input_ids, tokens.device)
    if pairs:
        rows, sources = on_device(torch.tensor(pairs).T, tokens.device)
        ids = ids.index_copy(0, rows, tokens[sources])
    return ids
