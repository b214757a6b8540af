"""How a server process starts and ends, in real processes with real signals."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from child_server import Child, prepare
from live_server import LiveServer

from w4a4.configs.errors import UsageError, W4A4Error
from w4a4.serve.process import bind
from w4a4.serve.settings import ServeSettings


@pytest.fixture
def start_child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    prepare()
    children: list[Child] = []

    def start(runner: dict[str, object] | None = None, **settings: object) -> Child:
        children.append(Child(tmp_path / f"errors{len(children)}", settings, {"num_pages": 64} | (runner or {})))
        return children[-1]

    yield start
    for child in children:
        child.close()


def read_to_end(connection: socket.socket, received: bytes) -> str:
    while piece := connection.recv(65536):
        received += piece
    connection.close()
    return received.decode()


def test_sigterm_lets_running_requests_finish(start_child: Callable[..., Child]) -> None:
    child = start_child({"step_seconds": 0.02}, shutdown_timeout=20.0)
    connection, received = child.stream(60)
    child.signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.HTTPError):  # no new connections
        httpx.get(child.url + "/health")
    text = read_to_end(connection, received)
    assert '"finish_reason": "length"' in text and "[DONE]" in text
    assert "error" not in text
    code, errors = child.wait()
    assert (code, errors) == (0, "")


def test_after_the_timeout_requests_are_aborted_with_a_word(start_child: Callable[..., Child]) -> None:
    child = start_child({"step_seconds": 0.02}, shutdown_timeout=0.3)
    connection, received = child.stream(500)
    start = time.monotonic()
    child.signal(signal.SIGTERM)
    text = read_to_end(connection, received)
    assert "the server is shutting down" in text and "[DONE]" in text
    assert child.wait()[0] == 0
    assert time.monotonic() - start < 4


def test_a_second_signal_does_not_wait_and_sigint_is_130(start_child: Callable[..., Child]) -> None:
    child = start_child({"step_seconds": 0.02}, shutdown_timeout=60.0)
    connection, _ = child.stream(500)
    child.signal(signal.SIGINT)
    time.sleep(0.3)
    start = time.monotonic()
    child.signal(signal.SIGINT)
    code, errors = child.wait()
    assert (code, errors) == (130, "")
    assert time.monotonic() - start < 6
    connection.close()


def test_an_idle_server_ends_at_once(start_child: Callable[..., Child]) -> None:
    child = start_child()
    assert child.client.get("/health").status_code == 200
    start = time.monotonic()
    child.signal(signal.SIGTERM)
    assert child.wait()[0] == 0
    assert time.monotonic() - start < 3


def test_a_failing_device_fails_requests_cleanly_and_the_process(start_child: Callable[..., Child]) -> None:
    child = start_child({"fail_after": 5, "step_seconds": 0.02})
    connection, received = child.stream(100)
    text = read_to_end(connection, received)
    assert "illegal memory access" in text and "[DONE]" in text
    code, errors = child.wait()
    assert code == 1
    assert "error: the engine failed: CUDA error: an illegal memory access" in errors


def test_health_is_503_once_the_engine_is_dead() -> None:
    live = LiveServer()
    live.runner.fail_after = 0
    response = live.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    health = live.client.get("/health")
    assert health.status_code == 503
    assert "the engine has failed: CUDA error" in health.json()["error"]["message"]
    again = live.client.post("/v1/completions", json={"prompt": "x"})
    assert again.status_code == 503
    outcome = live.stop()
    assert isinstance(outcome, W4A4Error) and outcome.exit_code == 1


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        ) as caught:
            bind("127.0.0.1", port)
        assert "--port" in caught.value.hint
    with pytest.raises(UsageError, match="--host no.such.host.invalid"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("max_queued", -1),
        ("port", 70000),
        ("gpu_memory_utilization", 1.5),
        ("api_keys", ("",)),
        ("api_keys", ("schlüssel",)),
        ("request_timeout", 0),
        ("shutdown_timeout", -1),
        ("max_body_bytes", 0),
    ],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: object) -> None:
    with pytest.raises(UsageError, match="--" + field.replace("_", "-").removesuffix("s")):
        ServeSettings(checkpoint=Path("x"), **{field: value})  # type: ignore[arg-type]


def test_the_name_of_the_model_is_the_folders() -> None:
    assert ServeSettings(checkpoint=Path("/data/llama-w4a4/")).model_name == "llama-w4a4"
    assert ServeSettings(checkpoint=Path("x"), served_model_name="mine").model_name == "mine"
