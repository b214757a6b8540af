"""What a request asks for, what the engine answers, and the state it keeps in between.

`Request` and `SamplingParams` are what a caller hands in, validated once; `Output` is what comes back, one per step and
request that has news; `Sequence` is the engine's own record of a request while it lives. Nothing here knows HTTP,
text templates or tensors on a device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from w4a4.serve.detokenizer import Detokenizer
    from w4a4.serve.grammar import GrammarState
    from w4a4.serve.sampler import SamplerState

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of all stop strings together
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024


class FinishReason(StrEnum):
    """Why a request ended. The first two are OpenAI's words; `abort` and `error` never carry a complete answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _check(condition: bool, name: str, got: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {got}, expected {expected}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    _check(math.isfinite(value) and low <= value <= high, name, value, f"a number between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    `temperature` 0 is greedy: exact argmax of the logits after penalties, bias and grammar. `max_tokens` None means as
    many as the model's length allows. `logprobs` None asks for none, 0 for the chosen token alone, n for the best n
    as well; they are log-softmax of the raw logits, before any penalty or temperature. `prompt_logprobs` likewise, for
    every token of the prompt but the first. Raises ValueError naming the field, the value and what is allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_p", self.top_p, 0, 1)
        _check(self.top_p > 0, "top_p", self.top_p, "more than 0")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off) or a positive count")
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a signed 64-bit integer")
        _check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", len(self.logit_bias), f"<= {MAX_LOGIT_BIAS} ids")
        for token_id, bias in self.logit_bias.items():
            _check(token_id >= 0, "logit_bias", token_id, "a token id")
            _check_range(f"logit_bias[{token_id}]", bias, -100, 100)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"between 0 and {MAX_LOGPROBS}")
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"<= max_tokens {self.max_tokens}"
            )
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"<= {MAX_STOP_STRINGS}")
        _check(all(self.stop), "stop", "an empty string", "non-empty strings")
        total = sum(map(len, self.stop))
        _check(total <= MAX_STOP_LENGTH, "stop", f"{total} characters together", f"<= {MAX_STOP_LENGTH}")
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"{len(self.stop_token_ids)} ids",
            f"<= {MAX_STOP_TOKEN_IDS}",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `request_id` is unique among the requests that live; `grammar` is a compiled
    constraint.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability and the best alternatives, best first: pairs of token id and log-probability."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Output:
    """News about one request: what this step added. The last one has a `finish_reason`.

    `text` is what may be shown now: characters that could still become a stop string, or that are not a complete
    UTF-8 sequence yet, come with a later output. `stop_reason` is the stop string or the stop token id that matched,
    None for an EOS. The counts and times (monotonic seconds) are totals so far.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""
    times: Times | None = None

    def extend(self, later: Output) -> None:
        """Merge a later output of the same request into this one: a slow reader gets fewer and longer pieces."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.times = later.times or self.times


@dataclass(slots=True)
class Times:
    """When things happened to a request, in `time.monotonic()` seconds; 0.0 means not yet."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while the engine works on it.

    `tokens` is prompt and answer together; the first `num_computed` of them have their K and V in `pages`. The
    scheduler owns everything from `arrival` to `num_preemptions`, the sampler `sampler_state`, the engine the rest.
    """

    request: Request
    max_tokens: int
    stop_ids: frozenset[int]  # EOS and stop_token_ids: any of them ends the answer
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    arrival: int = 0  # ascending in order of arrival
    num_computed: int = 0
    num_cached: int = 0  # of num_computed, found in the prefix cache at the first admission
    num_ahead: int = 0  # 1 while the device has sampled a token that the host has not seen
    pages: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)
    sink_slot: int = -1
    row: int = -1  # row of the block table; -1 while waiting
    num_preemptions: int = 0

    sampler_state: SamplerState | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""

    # Constants of the request that every step asks for.
    num_prompt: int = field(init=False)
    is_plain: bool = field(init=False)  # the sampler takes its logits as they are

    def __post_init__(self) -> None:
        params = self.request.params
        self.tokens = list(self.request.prompt_ids)
        self.num_prompt = len(self.request.prompt_ids)
        self.is_plain = not (
            params.has_penalties or params.logit_bias or params.min_tokens or self.request.grammar is not None
        )

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose K and V are not in the pages: 1 while decoding, more while prefilling."""
        return len(self.tokens) + self.num_ahead - self.num_computed

    @property
    def is_ending(self) -> bool:
        """The device has sampled the last token that it may have: nothing is left to compute."""
        return self.num_ahead > 0 and self.num_output + self.num_ahead >= self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
