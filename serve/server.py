"""The OpenAI-compatible HTTP server: routes, and nothing else. What they mean is in `service.py`.

`create_app` needs a service whose engine has been started; `process.py` owns sockets, signals and the order of things.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from w4a4.serve.failures import ApiError, validation_error
from w4a4.serve.guards import ApiKeyGuard, BodyGuard
from w4a4.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    TokenizeRequest,
)
from w4a4.serve.request import Output
from w4a4.serve.responses import Reply, failure_event, failure_of
from w4a4.serve.service import Service
from w4a4.serve.settings import ServeSettings
from w4a4.serve.streams import Channel

MAX_FIELDS = 256
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 500, 503)
}


class StrictJsonRequest(Request):
    """A request whose JSON is JSON: no NaN, no lone surrogates, no invalid UTF-8; and not of thousands of fields."""

    async def json(self) -> Any:
        try:
            value = pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from None
        if isinstance(value, dict) and len(value) > MAX_FIELDS:  # each unknown one would become an error of its own
            raise ApiError(400, f"the body has {len(value)} fields, expected at most {MAX_FIELDS}")
        return value


class StrictJsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictJsonRequest(request.scope, request.receive))

        return handle


class EventStream(Response):
    """Server-sent events of one answer. A client that goes away ends the generation."""

    def __init__(self, reply: Reply, channel: Channel) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.body = b""
        self.init_headers(STREAM_HEADERS)
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]
        self._reply = reply
        self._channel = channel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        channel, reply = self._channel, self._reply
        watcher = asyncio.ensure_future(_watch(receive, channel))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": reply.opening(), "more_body": True})
            while channel.num_open:
                items = await channel.next()
                if not items:
                    return
                events = b""
                failure = None
                for choice, output in items:
                    failed = failure_of(output)
                    if failed is not None:  # may have been merged with text that came before
                        failure = failure or failed
                        output.finish_reason = None
                    events += reply.chunk(choice, output)
                if failure is not None:
                    await send({"type": "http.response.body", "body": events + failure_event(failure)})
                    return
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": reply.closing()})
        finally:
            watcher.cancel()
            channel.close()


async def _watch(receive: Receive, channel: Channel) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    channel.disconnect()


async def _collect(request: Request, reply: Reply, channel: Channel) -> Response:
    """The whole answer; a client that goes away ends the generation."""
    watcher = asyncio.ensure_future(_watch(request.receive, channel))
    outputs: dict[int, Output] = {}
    try:
        while channel.num_open:
            items = await channel.next()
            if not items:
                return Response(status_code=499)  # nobody reads it
            for choice, output in items:
                failure = failure_of(output)
                if failure is not None:
                    raise failure
                if choice in outputs:
                    outputs[choice].extend(output)
                else:
                    outputs[choice] = output
    finally:
        watcher.cancel()
        channel.close()
    return JSONResponse(reply.whole([outputs[choice] for choice in range(len(outputs))]))


def _chat_page() -> tuple[str, str]:
    """The page at / and a content security policy that lets only its own script and style run."""
    html = files("w4a4.serve").joinpath("chat.html").read_text()

    def digest(tag: str) -> str:
        match = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert match is not None
        return base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()

    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src 'sha256-{digest('script')}'; "
        f"style-src 'sha256-{digest('style')}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def create_app(service: Service, settings: ServeSettings) -> FastAPI:
    """The ASGI application around a service."""
    app = FastAPI(
        title="w4a4",
        version=version("w4a4"),
        description="OpenAI-compatible server of 4-bit models.",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        responses=FAILURES,
    )
    app.router.route_class = StrictJsonRoute
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes, timeout=settings.request_timeout)
    app.add_middleware(ApiKeyGuard, keys=settings.api_keys)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_own_routes(app, service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return validation_error(error.errors()).response()

    @app.exception_handler(StarletteHTTPException)
    async def http_error(_: Request, error: StarletteHTTPException) -> Response:
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def our_bug(_: Request, error: Exception) -> Response:
        return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error").response()


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    created = service.created

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "w4a4",
            "max_model_len": service.engine.info.max_model_len,
        }

    @app.get("/v1/models", tags=["openai"])
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", tags=["openai"])
    async def get_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card()

    @app.post("/v1/completions", tags=["openai"], response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        reply, channel = await service.start_completion(body)
        return EventStream(reply, channel) if body.stream else await _collect(request, reply, channel)

    @app.post("/v1/chat/completions", tags=["openai"], response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        reply, channel = await service.start_chat(body)
        return EventStream(reply, channel) if body.stream else await _collect(request, reply, channel)


def _add_own_routes(app: FastAPI, service: Service) -> None:
    page, policy = _chat_page()

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return HTMLResponse(page, headers=headers)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        if body.messages is not None:
            options = {"add_generation_prompt": body.add_generation_prompt is not False}
            ids = await service.chat_ids(body.messages, options)
        else:
            ids = await service.text_ids(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": service.engine.info.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in ids]
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.check_model(body.model)
        return {"prompt": await service.decode(body.tokens)}

    @app.get("/health", responses={503: {"model": ErrorResponse}})
    async def health() -> dict[str, str]:
        engine = service.engine
        if engine.failure is not None:
            raise ApiError(503, f"the engine has failed: {engine.failure}", code="engine_failed")
        if not engine.is_alive:
            raise ApiError(503, "the engine is not running", code="engine_stopped")
        return {"status": "ok"}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def get_version() -> dict[str, Any]:
        info = service.engine.info
        return {
            "version": version("w4a4"),
            "model": service.model_name,
            "device": info.device,
            "path": info.path,
            "max_model_len": info.max_model_len,
        }


def openapi_json(app: FastAPI) -> str:
    """The schema as a document, for tests and clients."""
    return json.dumps(app.openapi())
