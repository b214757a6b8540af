"""What stands before the routes: API keys, a limit on bodies and on how long a client may take to send one.

Plain ASGI, so that responses stream through untouched and a disconnect reaches the handler.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from w4a4.serve.failures import ApiError

OPEN_PATHS = frozenset({"/", "/health"})  # need no key: the page asks for one, and probes have none
DISCARD_FACTOR = 4  # a body this many limits long is read to its end, so that the client gets to read the answer


class ApiKeyGuard:
    """Lets requests through that carry one of the keys as `Authorization: Bearer KEY`. Without keys, every request."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS and not is_preflight:
            given = b""
            for name, value in scope["headers"]:
                if name == b"authorization" and value[:7].lower() == b"bearer ":
                    given = value[7:].strip()
            # All keys are compared, each in constant time: how long it takes tells nothing.
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                error = ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyGuard:
    """Reads the whole body before the routes do: at most `max_bytes` (else 413) within `timeout` seconds (else 408)."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._timeout:g} s", code="request_timeout")
            await error.response()(scope, receive, _closing(send))
            return
        except ApiError as error:
            await error.response()(scope, receive, _closing(send))
            return
        if body is None:  # the client is gone
            return
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        pieces: list[bytes] = []
        size = 0
        deadline = time.monotonic() + self._timeout / 2
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece: bytes = message.get("body", b"")
            more_body = message.get("more_body", False)
            size += len(piece)
            if size <= self._max_bytes:
                pieces.append(piece)
                continue
            pieces.clear()
            if size > DISCARD_FACTOR * self._max_bytes or time.monotonic() > deadline:
                break
        if size > self._max_bytes:
            raise ApiError(413, f"the body has more than {self._max_bytes} bytes", code="request_too_large")
        return b"".join(pieces)


def _closing(send: Send) -> Send:
    """The connection cannot be used again: part of the body may be unread."""

    async def close_after(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        await send(message)

    return close_after
