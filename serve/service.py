"""From an API request to the engine's requests: prompts, templates, grammars, and what each answer must look like.

Knows the protocol, the tokenizer and the engine; knows neither FastAPI nor tensors. Long texts are tokenised, and
schemas compiled, in one worker thread, so that the event loop keeps streaming.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

from w4a4.configs.errors import W4A4Error
from w4a4.configs.generation_config import PartialSampling
from w4a4.serve.engine import Engine, EngineStoppedError, QueueFullError
from w4a4.serve.failures import RETRY_AFTER_SECONDS, ApiError
from w4a4.serve.grammar import GrammarCompiler, GrammarState
from w4a4.serve.metrics import Metrics
from w4a4.serve.protocol import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)
from w4a4.serve.request import Request
from w4a4.serve.responses import ChoiceText, Reply
from w4a4.serve.streams import Channel, Dispatcher
from w4a4.serve.tokenizer import ChatTemplateError, Tokenizer

DEFAULT_MAX_TOKENS = 16  # of a completion, as at OpenAI
LONG_TEXT = 4096  # characters; shorter ones take less than a thread switch is worth
MAX_COMPILING = 2
COMPILE_TIMEOUT = 30.0  # seconds

Result = TypeVar("Result")


class Service:
    """One model and its engine, for the routes. All methods belong to the event loop.

    `sampling`: what holds where a request says nothing.
    """

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model_name: str,
        metrics: Metrics,
        sampling: PartialSampling,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.metrics = metrics
        self._sampling = sampling
        self._dispatcher = dispatcher
        self.created = int(time.time())
        self._num_compiling = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="w4a4-text")

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def start_completion(self, body: CompletionRequest) -> tuple[Reply, Channel]:
        """Submit the requests of a completion. Raises ApiError."""
        self.check_model(body.model)
        try:
            prompts = body.prompts
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None
        self._check_count(len(prompts) * body.num_choices)
        texts: list[ChoiceText] = []
        requests: list[Request] = []
        for prompt in prompts:
            ids = await self._prompt_ids(prompt, add_special_tokens=body.add_special_tokens is not False)
            self._check_length(ids, body.max_tokens, "max_tokens")
            room = self.engine.info.max_model_len - len(ids)
            echo_text = ""
            if body.echo:
                if isinstance(prompt, str):
                    echo_text = prompt
                else:
                    echo_text = await self.decode(ids)
            for choice in range(body.num_choices):
                texts.append(ChoiceText(echo_text, ids if body.echo else ()))
                requests.append(
                    await self._request(
                        body,
                        ids,
                        choice,
                        max_tokens=min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else body.max_tokens,
                        logprobs=body.logprobs,
                        prompt_logprobs=body.logprobs if body.echo else None,
                    )
                )
        reply = self._reply(body, texts, is_chat=False, has_logprobs=body.logprobs is not None)
        return reply, self._open(requests)

    async def start_chat(self, body: ChatCompletionRequest) -> tuple[Reply, Channel]:
        """Submit the requests of a chat completion. Raises ApiError."""
        self.check_model(body.model)
        self._check_count(body.num_choices)
        options = dict(body.chat_template_kwargs or {})
        for name in ("messages", "conversation", "tokenize", "chat_template", "return_dict"):
            if name in options:
                raise ApiError(400, f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.continue_final_message:
            options["continue_final_message"] = True
        else:
            options["add_generation_prompt"] = body.add_generation_prompt is not False
        ids = await self.chat_ids(body.messages, options)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self._check_length(ids, body.max_new_tokens, name)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        requests = [
            await self._request(
                body, ids, choice, max_tokens=body.max_new_tokens, logprobs=top_logprobs, prompt_logprobs=None
            )
            for choice in range(body.num_choices)
        ]
        texts = [ChoiceText() for _ in requests]
        return self._reply(body, texts, is_chat=True, has_logprobs=bool(body.logprobs)), self._open(requests)

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises ApiError."""
        longest = self.engine.info.max_model_len
        least = self.tokenizer.least_num_tokens(text)
        if least > longest:  # encoding megabytes takes seconds
            raise _too_long(longest, f"at least {least}")
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        try:
            return await self._run(len(text), encode)
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None

    async def chat_ids(self, messages: list[ChatMessage], options: dict[str, Any]) -> list[int]:
        """Token ids of a chat through the checkpoint's template. Raises ApiError."""
        plain = [message.for_template() for message in messages]
        size = sum(len(message["content"]) for message in plain)
        try:
            text = await self._run(size, partial(self.tokenizer.render_chat, plain, options))
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        return await self.text_ids(text, add_special_tokens=False)

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids. Raises ApiError for ids that are not in the vocabulary."""
        self._check_ids(ids)
        return await self._run(len(ids), partial(self.tokenizer.decode, ids))

    async def _prompt_ids(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            return await self.text_ids(prompt, add_special_tokens=add_special_tokens)
        return prompt

    async def _request(
        self,
        body: GenerationFields,
        ids: list[int],
        choice: int,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Request:
        try:
            params = body.sampling_params(
                self._sampling,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                choice=choice,
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return Request(uuid.uuid4().hex, tuple(ids), params, await self._grammar(body.response_format))

    async def _grammar(self, wanted: ResponseFormat | None) -> GrammarState | None:
        if wanted is None or wanted.type == "text":
            return None
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
        try:
            return await self._compile(schema)
        except W4A4Error as error:
            raise ApiError(400, f"{error.message}: {error.hint}", param="response_format") from None
        except ValueError as error:
            raise ApiError(400, str(error), param="response_format") from None

    async def _compile(self, schema: dict[str, Any]) -> GrammarState:
        """In a thread of its own: some schemas take minutes, and only the end of the process stops the compiler."""
        if self._num_compiling >= MAX_COMPILING:
            raise ApiError(
                503, "other schemas are being compiled", code="compiler_busy", retry_after=RETRY_AFTER_SECONDS
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GrammarState] = loop.create_future()

        def finish(state: GrammarState | None, error: Exception | None) -> None:
            self._num_compiling -= 1
            if future.done():  # nobody waits any more
                return
            if error is not None:
                future.set_exception(error)
            elif state is not None:
                future.set_result(state)

        def work() -> None:
            try:
                state, error = self._compiler.compile_schema(schema), None
            except Exception as caught:  # handed to whoever waits
                state, error = None, caught
            with suppress(RuntimeError):  # the loop is closed: the server is gone
                loop.call_soon_threadsafe(finish, state, error)

        self._num_compiling += 1
        threading.Thread(target=work, name="w4a4-grammar", daemon=True).start()
        try:
            return await asyncio.wait_for(future, COMPILE_TIMEOUT)
        except TimeoutError:
            raise ValueError(
                f"response_format: the JSON schema took more than {COMPILE_TIMEOUT:g} s to compile"
            ) from None

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer.hf, self.engine.info.vocab_size, self.engine.config.eos_ids)

    async def _run(self, size: int, function: Callable[[], Result]) -> Result:
        """Call it here if it is quick, in the worker thread if there are many characters (`size`) to work on."""
        if size <= LONG_TEXT:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _open(self, requests: list[Request]) -> Channel:
        try:
            return self._dispatcher.open(requests)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except QueueFullError as error:
            self.metrics.rejected.inc()
            raise ApiError(503, error.message, code="queue_full", retry_after=RETRY_AFTER_SECONDS) from None
        except EngineStoppedError as error:
            raise ApiError(503, error.message, code="engine_stopped", retry_after=RETRY_AFTER_SECONDS) from None

    def _reply(self, body: GenerationFields, texts: list[ChoiceText], *, is_chat: bool, has_logprobs: bool) -> Reply:
        options = body.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        return Reply(
            self.tokenizer,
            self.model_name,
            is_chat,
            texts,
            num_per_prompt=body.num_choices,
            has_logprobs=has_logprobs,
            continuous_usage=continuous,
            include_usage=continuous or (options is not None and bool(options.include_usage)),
        )

    def _check_length(self, ids: list[int], max_tokens: int | None, name: str) -> None:
        """Prompt and answer, as long as the field `name` asks for it, fit into the model."""
        longest = self.engine.info.max_model_len
        if not ids:
            raise ApiError(400, "the prompt is empty: at least one token is needed", param="prompt")
        if len(ids) + (max_tokens != 0) > longest:
            raise _too_long(longest, str(len(ids)))
        if max_tokens is not None and len(ids) + max_tokens > longest:
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens; the prompt has {len(ids)} and {name} is "
                f"{max_tokens}, together {len(ids) + max_tokens}",
                code="context_length_exceeded",
                param=name,
            )

    def _check_ids(self, ids: list[int]) -> None:
        size = self.engine.info.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise ApiError(400, f"token id {token_id} is not in the vocabulary of {size}")

    def _check_count(self, count: int) -> None:
        limit = min(MAX_PROMPTS, self.engine.config.max_num_seqs + self.engine.config.max_queued)
        if count > limit:
            raise ApiError(400, f"{count} answers were asked for at once, at most {limit} can be", param="n")


def _too_long(longest: int, given: str) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {longest} tokens; the prompt has {given} and leaves no room for an "
        "answer",
        code="context_length_exceeded",
        param="prompt",
    )
