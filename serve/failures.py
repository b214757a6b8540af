"""Errors as HTTP answers, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from starlette.responses import Response

RETRY_AFTER_SECONDS = 1


class ApiError(HTTPException):
    """A request that ends with a status of 400 or more. FastAPI lets its own kind pass where it wraps all others."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def json(self) -> bytes:
        return json.dumps(self.body).encode()

    def response(self) -> Response:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.json, self.status, headers, media_type="application/json")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Pydantic's complaints about the first wrong field as one line, without what was sent: it may be large."""
    first = errors[0]
    path = _path(first)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown parameter"
    elif not path and first["type"] in ("missing", "model_attributes_type"):
        message = "the body must be a JSON object, with content-type: application/json"
    elif len(path) < len(_location(first)):  # a union: each of its types complains, those that came furthest count
        others = [error for error in errors if _path(error)[: len(path)] == path]
        path = max(map(_path, others), key=len)
        message = " or ".join(dict.fromkeys(error["msg"] for error in others if _path(error) == path))
    name = ".".join(path)
    return ApiError(400, f"{name}: {message}" if name else message, param=name or None)


def _location(error: Any) -> list[str]:
    return [str(part) for part in error["loc"] if part != "body"]


def _path(error: Any) -> list[str]:
    """Fields and indices on the way to what is wrong. Types of a union are named there too: `list[constrained-str]`."""
    return [part for part in _location(error) if part.replace("_", "").isalnum() and part not in ("str", "int")]
