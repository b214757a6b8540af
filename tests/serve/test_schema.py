"""The server against its own OpenAPI schema: whatever fits it, and much that does not, ends without a server error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from live_server import LiveServer

schemathesis = pytest.importorskip("schemathesis")

OPERATIONS = {
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
}


@pytest.fixture(scope="module")
def api_schema(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


def test_the_schema_names_every_operation(server: LiveServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == OPERATIONS


@pytest.mark.parametrize("max_examples", [6, pytest.param(300, marks=pytest.mark.e2e)])
@pytest.mark.parametrize(
    ("operation", "mode"),
    [(operation, "POSITIVE") for operation in sorted(OPERATIONS)]
    + [(operation, "NEGATIVE") for operation in sorted(OPERATIONS) if operation[0] == "POST"],
)
def test_nothing_ends_in_a_server_error(
    api_schema: Any, operation: tuple[str, str], mode: str, max_examples: int
) -> None:
    method, path = operation
    wanted = api_schema[path][method]

    @given(wanted.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
    @settings(
        max_examples=max_examples if method == "POST" else 2,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        response = case.call(timeout=20)
        case.validate_response(response, checks=[schemathesis.checks.not_a_server_error])

    check()
