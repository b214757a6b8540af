"""What stands before the routes: API keys, a limit on bodies and on how long a client may take to send one.

Plain ASGI, so that responses stream through untouched and a disconnect reaches the handler.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from w4a4.serve.failures import ApiError

OPEN_PATHS = frozenset({"/", "/health"})  # need no key: the page asks for one, and probes have none
DISCARD_FACTOR = 4  # of a refused body this many limits are still read
DISCARD_SECONDS = 5.0  # and for so long


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
            self._check_size(_declared_length(scope))
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._timeout:g} s", code="request_timeout")
            await self._refuse(error, receive, send)
            return
        except ApiError as error:
            await self._refuse(error, receive, send)
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

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(413, f"the body has more than {self._max_bytes} bytes", code="request_too_large")

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client went away. Raises ApiError as soon as it is too long."""
        pieces: list[bytes] = []
        size = 0
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            more_body = message.get("more_body", False)
            size += len(pieces[-1])
            self._check_size(size)
        return b"".join(pieces)

    async def _refuse(self, error: ApiError, receive: Receive, send: Send) -> None:
        """Answer at once, then read on for a while what the client is still sending.

        The connection cannot be used again, and one that is closed on unread bytes is reset: the answer would be lost.
        """
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        left = DISCARD_FACTOR * self._max_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(min(DISCARD_SECONDS, self._timeout)):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b""})


def _declared_length(scope: Scope) -> int:
    """Content-Length, which the HTTP parser has checked to be a number; 0 if there is none."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths else 0
