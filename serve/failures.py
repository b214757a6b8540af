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
    """The first of pydantic's complaints as one line. What was sent is not repeated: it may be large, or no JSON."""
    first = errors[0]
    location = [str(part) for part in first["loc"] if part != "body"]
    # Members of a union appear in the location under names such as `list[constrained-str]`.
    path = ".".join(part for part in location if part.replace("_", "").isalnum()) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown parameter"
    if path is None and first["type"] in ("missing", "model_attributes_type"):
        message = "the body must be a JSON object, with content-type: application/json"
    return ApiError(400, f"{path}: {message}" if path else message, param=path)
