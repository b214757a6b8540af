"""From logits to tokens, for all sequences of a step at once.

Order: grammar, logit bias and minimum length (what is allowed), penalties (on the logits, as in the CTRL paper and
OpenAI's documentation), temperature, min_p, top_k, top_p, then one draw. Greedy rows take the exact argmax after the
penalties. The draw is the exponential race: argmax of p / e with e ~ Exp(1) picks token i with probability p_i,
without a sort and without a device synchronisation. A request with a seed draws from its own generator, so its answer
does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from w4a4.serve.request import SamplingParams, Sequence, TokenLogprob


@dataclass(slots=True)
class SamplerState:
    """What sampling a sequence needs to remember. Tensors are on the logits' device and exist only if used.

    `seen` marks every token of prompt and answer (repetition penalty); `counts` counts the answer's tokens (presence
    and frequency penalty); `bias` holds the ids and values of logit_bias.
    """

    generator: torch.Generator | None = None
    seen: Tensor | None = None  # bool [V]
    counts: Tensor | None = None  # float32 [V]
    bias: tuple[Tensor, Tensor] | None = None  # int64 [J], float32 [J]
    stop_ids: Tensor | None = None  # int64 [S], while min_tokens is not reached
    num_counted: int = field(default=0)  # tokens of the sequence that seen and counts know


class Sampled(NamedTuple):
    """One row's result; `is_finite` is False if the logits held NaN or nothing but infinities."""

    token: int
    is_finite: bool
    logprob: TokenLogprob | None


class PendingTokens:
    """Tokens [R] that are chosen on the device, and on their way to the host; `results` waits for them there."""

    def __init__(self, tokens: Tensor, best: Tensor) -> None:
        self.tokens = tokens
        both = torch.stack((tokens, torch.isfinite(best).long()))
        self._copied: torch.cuda.Event | None = None
        self._host = both
        if both.is_cuda:
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def results(self) -> list[Sampled]:
        if self._copied is not None:
            self._copied.synchronize()
        tokens, is_finite = self._host.tolist()
        return list(map(Sampled, tokens, map(bool, is_finite), [None] * len(tokens)))


class Sampler:
    """Samples rows of logits on one device for models with `vocab_size` tokens. Not for concurrent use."""

    def __init__(self, vocab_size: int, seed: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._generator: torch.Generator | None = None

    def sample(self, logits: Tensor, sequences: Rows[Sequence]) -> list[Sampled]:
        """Choose the next token of each sequence from float32 logits [R, V], which are overwritten."""
        params = [sequence.request.params for sequence in sequences]
        logprob_rows = [row for row, param in enumerate(params) if param.logprobs is not None]
        raw = torch.log_softmax(logits[logprob_rows], dim=-1) if logprob_rows else None
        results = self.sample_later(logits, sequences).results()  # on a GPU this is where the step is waited for
        if raw is not None:
            chosen = [results[row].token for row in logprob_rows]
            tops = [params[row].logprobs or 0 for row in logprob_rows]
            for row, logprob in zip(logprob_rows, gather_logprobs(raw, chosen, tops), strict=True):
                results[row] = results[row]._replace(logprob=logprob)
        return results

    def sample_later(self, logits: Tensor, sequences: Rows[Sequence]) -> PendingTokens:
        """`sample` without log-probabilities and, on a GPU, without waiting."""
        for row, sequence in enumerate(sequences):
            if not sequence.is_plain:
                self._shape(logits[row], sequence)
        best, tokens = _maxima(logits)
        sampled_rows = [row for row, sequence in enumerate(sequences) if not sequence.request.params.is_greedy]
        if sampled_rows:
            everything = len(sampled_rows) == len(sequences)
            index = on_device(torch.tensor(sampled_rows), logits.device)
            drawn = self._draw(
                logits if everything else logits[index], [sequences[row] for row in sampled_rows], best[index]
            )
            tokens = drawn if everything else tokens.index_copy(0, index, drawn)
        return PendingTokens(tokens, best)

    def _shape(self, logits: Tensor, sequence: Sequence) -> None:
        """Apply to one row [V], in place, whatever does not depend on other rows."""
        state = self._state(sequence, logits.device)
        params = sequence.request.params
        if params.has_penalties:
            self._count(state, sequence)
            assert state.seen is not None and state.counts is not None
            if params.repetition_penalty != 1.0:
                penalty = params.repetition_penalty
                penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
                logits.copy_(torch.where(state.seen, penalised, logits))
            logits -= params.frequency_penalty * state.counts + params.presence_penalty * (state.counts > 0)
        if state.bias is not None:
            logits.index_add_(0, *state.bias)
        if state.stop_ids is not None:
            if sequence.num_output < params.min_tokens:
                logits.index_fill_(0, state.stop_ids, -torch.inf)
            else:
                state.stop_ids = None
        if sequence.request.grammar is not None:
            sequence.request.grammar.mask(logits)

    def _state(self, sequence: Sequence, device: torch.device) -> SamplerState:
        state = sequence.sampler_state
        if state is None:
            params = sequence.request.params
            state = sequence.sampler_state = SamplerState()
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=device)
                state.bias = (ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device))
            if params.min_tokens and sequence.stop_ids:
                state.stop_ids = torch.tensor(sorted(sequence.stop_ids), device=device)
            if params.has_penalties:
                state.seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
                state.counts = torch.zeros(self.vocab_size, device=device)
            if params.seed is not None:
                state.generator = torch.Generator(device).manual_seed(params.seed)
        return state

    def _count(self, state: SamplerState, sequence: Sequence) -> None:
        """Bring `seen` and `counts` up to the sequence's last token."""
        assert state.seen is not None and state.counts is not None
        new = torch.tensor(sequence.tokens[state.num_counted :], dtype=torch.int64, device=state.seen.device)
        state.seen[new] = True
        answer = new[max(sequence.num_prompt - state.num_counted, 0) :]
        state.counts.index_add_(0, answer, torch.ones(answer.shape[0], device=state.counts.device))
        state.num_counted = len(sequence.tokens)

    def _draw(self, logits: Tensor, sequences: Rows[Sequence], best: Tensor) -> Tensor:
        """One token per row [R, V] by temperature, min_p, top_k and top_p; `best` is each row's largest logit."""
        params = [sequence.request.params for sequence in sequences]
        device = logits.device
        temperature = on_device(torch.tensor([param.temperature for param in params]), device).unsqueeze(1)
        scaled = (logits - best.unsqueeze(1)) / temperature
        if any(param.min_p > 0 for param in params):
            # p_i >= min_p * p_max in logits: no softmax needed, and the best token always stays.
            floor = on_device(torch.tensor([param.min_p for param in params]), device).log().unsqueeze(1)
            scaled = scaled.masked_fill(scaled < floor, -torch.inf)
        limited = [row for row, param in enumerate(params) if param.top_k > 0 or param.top_p < 1]
        if limited:
            index = on_device(torch.tensor(limited), device)
            scaled[index] = _limit(scaled[index], [params[row] for row in limited])
        probabilities = torch.softmax(scaled, dim=-1)
        noise = self._noise(probabilities, sequences)
        return (probabilities / noise).argmax(dim=-1)

    def _noise(self, like: Tensor, sequences: Rows[Sequence]) -> Tensor:
        """Exp(1) noise [R, V]: rows with a seed from their own generator, the rest from the engine's."""
        if self._generator is None:
            self._generator = torch.Generator(like.device)
            if self._seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self._seed)
        noise = torch.empty_like(like)
        unseeded = [row for row, sequence in enumerate(sequences) if sequence.request.params.seed is None]
        if len(unseeded) == len(sequences):
            noise.exponential_(generator=self._generator)
        else:
            if unseeded:
                shared = torch.empty(len(unseeded), like.shape[1], dtype=like.dtype, device=like.device)
                noise[on_device(torch.tensor(unseeded), like.device)] = shared.exponential_(generator=self._generator)
            for row, sequence in enumerate(sequences):
                if sequence.request.params.seed is not None:
                    noise[row].exponential_(generator=self._state(sequence, like.device).generator)
        # float32 noise can round to 0: the quotient would be inf, or NaN for a forbidden token.
        return noise.clamp_(min=torch.finfo(noise.dtype).tiny)


def _limit(scaled: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """Keep the top_k best logits, and of those the smallest set whose probability reaches top_p [R, V].

    Both cut at a threshold, so tokens that tie with the last one kept stay as well.
    """
    vocab_size = scaled.shape[1]
    device = scaled.device
    ordered = scaled.sort(dim=-1, descending=True).values
    top_k = torch.tensor([min(param.top_k, vocab_size) if param.top_k > 0 else vocab_size for param in params])
    threshold = ordered.gather(1, on_device(top_k - 1, device).unsqueeze(1))
    ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    top_p = on_device(torch.tensor([param.top_p for param in params]), device).unsqueeze(1)
    before = probabilities.cumsum(dim=-1) - probabilities  # probability of everything better
    num_kept = ((before < top_p) & (ordered > -torch.inf)).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = torch.maximum(threshold, ordered.gather(1, num_kept - 1))
    return scaled.masked_fill(scaled < threshold, -torch.inf)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Host values on `device`, without waiting for what it does."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.is_cuda and logits.is_contiguous():
        from w4a4.kernels.row_maxima import row_maxima

        return row_maxima(logits)
    best, tokens = logits.max(dim=-1)
    return best, tokens


def gather_logprobs(logprobs: Tensor, tokens: Rows[int], tops: Rows[int]) -> list[TokenLogprob]:
    """Per row of log-probabilities [R, V]: those of the given token and of the `tops[row]` best, best first."""
    index = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device).unsqueeze(1)
    chosen = logprobs.gather(1, index).squeeze(1).tolist()
    num_top = min(max(tops, default=0), logprobs.shape[1])
    if num_top == 0:
        return [TokenLogprob(token, value, ()) for token, value in zip(tokens, chosen, strict=True)]
    values, ids = logprobs.topk(num_top, dim=-1)
    pairs = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, value, tuple(row[:top]))
        for token, value, row, top in zip(tokens, chosen, pairs, tops, strict=True)
    ]
