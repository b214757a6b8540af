"""The requests of the OpenAI API as typed models: what is allowed, and nothing that is silently dropped.

Every field that the official client can send is either honoured, refused by name, or, where it cannot change an
answer (`user`, `metadata`, ...), accepted without effect. Unknown fields are errors, as they are at OpenAI. Types are
strict and numbers finite; ranges that the engine knows are checked by `SamplingParams`. Lists have limits here, so that
eight megabytes of one do not keep the event loop from everybody else for seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from w4a4.configs.generation_config import PartialSampling
from w4a4.serve.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
_TOKEN_ID = re.compile("[0-9]{1,10}")

Item = TypeVar("Item")


class _FirstError(FailFast):
    """One wrong element is enough: a list can have millions. Hashable, so that it can be part of a union."""

    __hash__ = object.__hash__


ListOf = Annotated[list[Item], _FirstError()]
TokenIds = ListOf[int]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(StrictModel):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _needs_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class GenerationFields(StrictModel):
    """What completions and chat completions share. None means the default, as a field left out does."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[ListOf[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[ListOf[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Accepted without effect: none of these can change an answer here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling_params(
        self,
        defaults: PartialSampling,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        choice: int,
    ) -> SamplingParams:
        """Parameters of the choice-th answer; `defaults` hold where the request says nothing.

        Raises ValueError naming the field.
        """
        if not all(_TOKEN_ID.fullmatch(key) for key in self.logit_bias or ()):
            raise ValueError("logit_bias: keys are token ids, such as {'50256': -100}")
        logit_bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = self.seed
        if seed is not None:
            seed = (seed + choice + 2**63) % 2**64 - 2**63  # wraps at 64 bits
        said = PartialSampling(self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty)
        return SamplingParams(
            **said.or_else(defaults).said,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=seed,
            logit_bias=logit_bias,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=stop,
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class CompletionRequest(GenerationFields):
    prompt: str | TokenIds | ListOf[str] | ListOf[TokenIds]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix (fill in the middle) is not supported")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError("best_of is only supported if it equals n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 is only useful with echo: it asks for nothing")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself, as text or token ids. Raises ValueError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ValueError("prompt is an empty list: at least one token is needed")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ContentPart(StrictModel):
    """One part of a message. Only text has a meaning here; the others are named so that they can be refused by name."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[ListOf[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Fields of an assistant's message that clients send back as they got it.
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role} needs content")
        if isinstance(self.content, list):
            if not self.content:
                raise ValueError("content is an empty list of parts")
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise ValueError(f"content parts of type {part.type!r} are not supported, only text")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: content is one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


class ChatCompletionRequest(GenerationFields):
    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> ChatCompletionRequest:
        if self.tools and self.tool_choice != "none":
            raise ValueError("tools are not supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.max_new_tokens == 0:
            raise ValueError("max_tokens must be at least 1")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(StrictModel):
    """Text (`prompt`) or a chat (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: TokenIds


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Every answer with a status of 400 or more."""

    error: ErrorBody
