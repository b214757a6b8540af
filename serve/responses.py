"""Answers in OpenAI's shapes, whole and as server-sent events.

Most chunks of a stream carry a piece of text and nothing else; their JSON is put together from prepared parts,
because at 64 streams the chunks are what a step costs.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from w4a4.serve.failures import ApiError
from w4a4.serve.request import FinishReason, Output, TokenLogprob
from w4a4.serve.tokenizer import Tokenizer


@dataclass(slots=True)
class Usage:
    """Token counts over all choices; a prompt shared by several choices counts once."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


@dataclass(slots=True)
class ChoiceText:
    """One choice of a completion whose prompt is echoed: its prompt and how far `text_offset` has come."""

    echo_text: str = ""
    echo_ids: Sequence[int] = ()
    offset: int = 0


@dataclass(slots=True)
class Reply:
    """Builds the bodies of one answer. `is_chat` picks between the two APIs.

    `num_per_prompt` choices belong to each prompt, in order. `choices` is what each one echoes (completions only).
    """

    tokenizer: Tokenizer
    model: str
    is_chat: bool
    choices: list[ChoiceText]
    num_per_prompt: int = 1
    has_logprobs: bool = False
    continuous_usage: bool = False
    include_usage: bool = False
    reply_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    usage_of: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _head: str = ""
    _tail: str = ""

    def __post_init__(self) -> None:
        self.reply_id = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}
        self._head = "data: " + json.dumps(head)[:-1] + ', "choices": [{"index": '
        self._tail = "}]" + (', "usage": null' if self.include_usage else "") + "}\n\n"

    # Streams

    def opening(self) -> bytes:
        """What a stream begins with: each choice's role (chat), or the echoed prompts without log-probabilities."""
        if self.is_chat:
            delta = ', "delta": {"role": "assistant", "content": ""}, "finish_reason": null'
            return "".join(f"{self._head}{choice}{delta}{self._tail}" for choice in range(len(self.choices))).encode()
        return b"".join(
            self.chunk(choice, _text_output(text.echo_text))
            for choice, text in enumerate(self.choices)
            if text.echo_text and not self.has_logprobs
        )

    def chunk(self, choice: int, output: Output) -> bytes:
        """The event for a piece of an answer; empty if there is nothing to tell."""
        self._count(choice, output)
        finish = output.finish_reason
        if not output.text and finish is None and not output.logprobs and output.prompt_logprobs is None:
            return b""
        if not self.has_logprobs and not self.continuous_usage:
            text = encode_basestring_ascii(output.text)
            body = f'"delta": {{"content": {text}}}' if self.is_chat else f'"text": {text}'
            end = "null" if finish is None else f'"{finish.value}"'
            reason = "" if output.stop_reason is None else f', "stop_reason": {json.dumps(output.stop_reason)}'
            return (
                f'{self._head}{choice}, {body}, "logprobs": null, "finish_reason": {end}{reason}{self._tail}'
            ).encode()
        entry: dict[str, Any] = {"index": choice}
        text = output.text
        if self.is_chat:
            entry["delta"] = {"content": text}
            entry["logprobs"] = {"content": self._chat_logprobs(output.logprobs)} if self.has_logprobs else None
        else:
            logprobs, echoed = self._completion_logprobs(choice, output)
            entry["text"] = echoed + text
            entry["logprobs"] = logprobs
        entry["finish_reason"] = None if finish is None else finish.value
        if output.stop_reason is not None:
            entry["stop_reason"] = output.stop_reason
        body_json: dict[str, Any] = {**self._frame(is_chunk=True), "choices": [entry]}
        if self.include_usage:
            body_json["usage"] = self.usage.as_json() if self.continuous_usage else None
        return _event(body_json)

    def closing(self) -> bytes:
        """What a stream ends with: the usage if it was asked for, and [DONE]."""
        end = b"data: [DONE]\n\n"
        if self.include_usage:
            return _event({**self._frame(is_chunk=True), "choices": [], "usage": self.usage.as_json()}) + end
        return end

    # Whole answers

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from each choice's merged output."""
        choices = []
        for choice, output in enumerate(outputs):
            self._count(choice, output)
            assert output.finish_reason is not None
            entry: dict[str, Any] = {"index": choice}
            if self.is_chat:
                entry["message"] = {"role": "assistant", "content": output.text, "refusal": None}
                entry["logprobs"] = (
                    {"content": self._chat_logprobs(output.logprobs), "refusal": None} if self.has_logprobs else None
                )
            else:
                logprobs, _ = self._completion_logprobs(choice, output) if self.has_logprobs else (None, "")
                entry["text"] = self.choices[choice].echo_text + output.text
                entry["logprobs"] = logprobs
            entry["finish_reason"] = output.finish_reason.value
            entry["stop_reason"] = output.stop_reason
            choices.append(entry)
        return {**self._frame(is_chunk=False), "choices": choices, "usage": self.usage.as_json()}

    @property
    def usage(self) -> Usage:
        total = Usage()
        for choice, (num_prompt, num_output, num_cached) in self.usage_of.items():
            total.num_output += num_output
            if choice % self.num_per_prompt == 0:
                total.num_prompt += num_prompt
                total.num_cached += num_cached
        return total

    def _frame(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}

    def _count(self, choice: int, output: Output) -> None:
        if output.num_prompt_tokens:
            self.usage_of[choice] = (output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **self._chat_token(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_token(*p) for p in entry.top],
            }
            for entry in logprobs
        ]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id)
        return {"token": self.tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(data)}

    def _completion_logprobs(self, choice: int, output: Output) -> tuple[dict[str, Any] | None, str]:
        """The legacy format, and the prompt's text if this output is the one that brings the prompt."""
        if not self.has_logprobs:
            return None, ""
        text = self.choices[choice]
        entries: list[TokenLogprob | None] = list(output.logprobs)
        token_ids = [entry.token_id for entry in output.logprobs]
        echoed = ""
        if output.prompt_logprobs is not None and text.echo_ids:
            entries = [None, *output.prompt_logprobs, *entries]
            token_ids = [*text.echo_ids, *token_ids]
            echoed = text.echo_text
        tokens = [self.tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(text.offset)
            text.offset += len(token)
        tops: list[dict[str, float] | None] = []
        for entry, token in zip(entries, tokens, strict=True):
            if entry is None:
                tops.append(None)
                continue
            # The chosen token is listed as well, after the best ones if it is none of them.
            pairs = {self.tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in entry.top}
            tops.append(pairs if token in pairs else {**pairs, token: _finite(entry.logprob)})
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }, echoed


def failure_of(output: Output) -> ApiError | None:
    """The error that an output stands for, if it is not an answer."""
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(503, output.error or "the request was aborted", code="aborted", retry_after=1)
    if output.finish_reason is FinishReason.ERROR:
        return ApiError(500, output.error, code="engine_error")
    return None


def failure_event(error: ApiError) -> bytes:
    """An error in the middle of a stream: the official client raises it."""
    return _event(error.body) + b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _finite(logprob: float) -> float:
    """JSON has no infinity: -inf, a token that a mask forbids, reads -9999, as at OpenAI."""
    return max(logprob, -9999.0)


def _text_output(text: str) -> Output:
    return Output("", text, [], [], 0, 0, 0)
