"""What people and machines send by mistake or on purpose: an error in OpenAI's shape, and a server that goes on."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_runner import FakeRunner
from live_server import LiveServer

COMPLETION = {"prompt": "x", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
StartServer = Callable[..., LiveServer]


@pytest.fixture(autouse=True)
def goes_on(server: LiveServer) -> Iterator[None]:
    """After each of these tests the server answers as ever and holds nothing back."""
    yield
    response = server.client.post("/v1/completions", json={"prompt": "fine", "max_tokens": 4, "temperature": 0})
    assert response.json()["choices"][0]["text"] == server.answer("fine", 4)
    server.wait_until_idle()


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert len(error["message"]) < 1000
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"prompt": "x"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 x"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\x00b"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"\x00\x01\x02",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_malformed_json(server: LiveServer, path: str, body: bytes) -> None:
    error = refused(server.client.post(path, content=body, headers={"content-type": "application/json"}))
    if body in (b"", b"null", b"[]", b'"x"'):
        assert error["message"].startswith("the body must be a JSON object")
    elif b"1e999" not in body:  # which is JSON, of a number that no field takes
        assert error["message"].startswith("the body is not valid JSON: ")


def test_other_content_types(server: LiveServer) -> None:
    for options in (
        {"content": b'{"prompt": "x"}', "headers": {"content-type": "text/plain"}},
        {"content": b'{"prompt": "x"}'},
        {"data": {"prompt": "x"}},
        {"files": {"file": b"x"}},
        {},
    ):
        error = refused(server.client.post("/v1/completions", **options))  # type: ignore[arg-type]
        assert error["message"] == "the body must be a JSON object, with content-type: application/json"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ["x"] * 5000}, "stop"),
        ({"stop": "x" * 100_000}, "stop"),
        ({"stop_token_ids": [999_999]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(300)) * 10}, None),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"tempreature": 0.5}, "tempreature"),
        ({"model": 5}, "model"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_wrong_types_and_values(server: LiveServer, path: str, fields: dict[str, Any], name: str | None) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | fields
    if fields == {"stop_token_ids": list(range(300)) * 10}:
        assert "stop_token_ids" in refused(server.client.post(path, json=body))["message"]
        return
    error = refused(server.client.post(path, json=body))
    assert name is not None and name in error["message"] + str(error["param"])


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        [[], [1]],
        None,
        5,
        {"a": 1},
        [None],
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [1.5],
        [True],
        [-1],
        [300],
    ],
)
def test_prompts_that_are_none(server: LiveServer, prompt: Any) -> None:
    refused(server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}))


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": None}, "prompt", "Input should be a valid string or Input should be a valid list"),
        ({"prompt": {"a": 1}}, "prompt", "Input should be a valid string or Input should be a valid list"),
        ({"prompt": [1.5]}, "prompt.0", "Input should be a valid integer or Input should be a valid string or Input"),
        ({"stop": ["a", 5]}, "stop.1", "Input should be a valid string"),
    ],
)
def test_fields_of_several_types_are_named_without_them(
    server: LiveServer, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refused(server.client.post("/v1/completions", json=COMPLETION | fields))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {said}")


def test_lists_without_end_hold_up_nobody(server: LiveServer) -> None:
    """Each of these is a few megabytes, whose every element would be looked at."""
    user, parts = {"role": "user", "content": "a"}, [{"type": "text", "text": "a"}] * 100_000
    for path, body, said in (
        ("completions", COMPLETION | {"logit_bias": {str(i): 1 for i in range(100_000)}}, "at most 1024 items"),
        ("completions", COMPLETION | {"stop": ["ab"] * 300_000}, "at most 64 items"),
        ("completions", COMPLETION | {"stop_token_ids": [1] * 300_000}, "at most 256 items"),
        ("completions", COMPLETION | {f"field{i}": 1 for i in range(100_000)}, "100002 fields, expected at most 256"),
        ("chat/completions", CHAT | {"messages": [user] * 100_000}, "at most 4096 items"),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": parts}]}, "at most 1024 items"),
    ):
        content = json.dumps(body).encode()
        start = time.monotonic()
        response = server.client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
        assert time.monotonic() - start < 2
        assert said in refused(response)["message"]


def test_template_options_of_any_name_are_no_server_error(server: LiveServer) -> None:
    for name in ("self", "chat", "options", "messages", "conversation", "", "\u00fc", "tools", "documents"):
        body = CHAT | {"chat_template_kwargs": {name: 5}}
        assert server.client.post("/v1/chat/completions", json=body).status_code in (200, 400), name


def test_a_prompt_of_only_special_tokens_is_answered(server: LiveServer) -> None:
    for prompt in ("<eos>", "<bos><eos><bos>", [257, 257, 256]):
        response = server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, "ignore_eos": True})
        assert response.json()["usage"]["completion_tokens"] == 3


def test_too_long_a_prompt_names_both_lengths(server: LiveServer) -> None:
    for body in ({"prompt": "x" * 1024}, {"prompt": [1] * 1024}):
        error = refused(server.client.post("/v1/completions", json=body))
        assert "1024" in error["message"]
        assert error["code"] == "context_length_exceeded"
    error = refused(server.client.post("/v1/completions", json={"prompt": "x" * 3000}))
    assert "maximum context length is 1024 tokens; the prompt has 3000" in error["message"]
    messages = [{"role": "user", "content": "x" * 5000}]
    refused(server.client.post("/v1/chat/completions", json={"messages": messages}))


def test_more_tokens_than_the_model_has_room_for_name_both_numbers(server: LiveServer) -> None:
    prompt, messages = "x" * 1000, [{"role": "user", "content": "x" * 983}]  # 1000 tokens with the template
    for count in (25, 10**15):
        error = refused(server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": count}))
        assert f"the prompt has 1000 and max_tokens is {count}, together {count + 1000}" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        chat = {"messages": messages, "max_completion_tokens": count}
        error = refused(server.client.post("/v1/chat/completions", json=chat))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")
    for body, expected in (({"max_tokens": 24}, 24), ({}, 16)):
        body = {"prompt": prompt, "ignore_eos": True} | body
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"


def test_without_max_tokens_an_answer_ends_at_the_models_length(server: LiveServer) -> None:
    body = {"prompt": "x" * 1020, "ignore_eos": True}
    assert server.client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
    chat = {"messages": [{"role": "user", "content": "x" * 990}], "ignore_eos": True}
    answer = server.client.post("/v1/chat/completions", json=chat).json()
    assert answer["usage"]["total_tokens"] == 1024


@pytest.mark.parametrize(
    ("messages", "fragment"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{}], "role"),
        ([{"role": "user"}], "needs content"),
        ([{"role": "user", "content": None}], "needs content"),
        ([{"role": "assistant"}], "needs content"),
        ([{"role": "user", "content": []}], "empty list of parts"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "wizard", "content": "x"}], "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": "x", "extra": 1}], "unknown parameter"),
        ([{"role": "tool", "content": "x"}], "no tools here"),  # the template raises
    ],
)
def test_messages(server: LiveServer, messages: Any, fragment: str) -> None:
    error = refused(server.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}))
    assert fragment in error["message"]


def test_templates_that_raise_or_are_missing(start_server: StartServer) -> None:
    for template, fragment in (
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in messages %}{{ m.nothing.at.all }}{% endfor %}", "no attribute 'nothing'"),
        ("{% if %}", "chat template refuses"),
        (None, "no chat template"),
    ):
        live = start_server(chat_template=template)
        assert fragment in refused(live.client.post("/v1/chat/completions", json=CHAT))["message"]
    kwargs = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert (
        "may not hold chat_template" in refused(live.client.post("/v1/chat/completions", json=CHAT | kwargs))["message"]
    )


def test_fields_that_are_not_supported_are_refused_by_name(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert (
        "tools are not supported"
        in refused(server.client.post("/v1/chat/completions", json=CHAT | {"tools": tools}))["message"]
    )
    assert "suffix" in refused(server.client.post("/v1/completions", json=COMPLETION | {"suffix": "y"}))["message"]
    assert "best_of" in refused(server.client.post("/v1/completions", json=COMPLETION | {"best_of": 3}))["message"]
    assert (
        server.client.post("/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": "none"}).status_code
        == 200
    )


def test_a_schema_that_cannot_be_compiled(server: LiveServer) -> None:
    pytest.importorskip("xgrammar")
    for schema in ({"type": "no such type"}, {"$ref": "#/nowhere"}):
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        assert (
            "JSON schema"
            in refused(server.client.post("/v1/chat/completions", json=CHAT | {"response_format": wanted}))["message"]
        )
    huge = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["x" * 100_000]}}}
    error = refused(server.client.post("/v1/chat/completions", json=CHAT | {"response_format": huge}))
    assert "the JSON schema has 100014 characters, expected <= 65536" in error["message"]
    combined = COMPLETION | {"response_format": {"type": "json_object"}, "ignore_eos": True}
    assert "ignore_eos" in refused(server.client.post("/v1/completions", json=combined))["message"]


def test_a_schema_that_takes_for_ever_holds_up_nobody(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr("w4a4.serve.service.COMPILE_TIMEOUT", 0.2)
    end = threading.Event()
    monkeypatch.setattr("w4a4.serve.grammar.GrammarCompiler.compile_schema", lambda *_: end.wait(30))
    live = start_server()
    body = CHAT | {"response_format": {"type": "json_object"}}
    for _ in range(2):
        error = refused(live.client.post("/v1/chat/completions", json=body))
        assert "took more than 0.2 s" in error["message"]
    assert refused(live.client.post("/v1/chat/completions", json=body), 503)["code"] == "compiler_busy"
    assert live.client.post("/v1/completions", json=COMPLETION).status_code == 200
    end.set()


def test_of_two_equal_keys_the_last_counts(server: LiveServer) -> None:
    body = b'{"prompt": "a", "prompt": "twice", "max_tokens": 9, "max_tokens": 4, "temperature": 0, '
    body += b'"stop": ["a"], "stop": null, "stream": true, "stream": false}'
    answer = server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["text"] == server.answer("twice", 4)


def test_wrong_paths_and_methods(server: LiveServer) -> None:
    refused(server.client.get("/v1/nothing"), 404)
    refused(server.client.get("/v1/completions"), 405)
    refused(server.client.post("/health"), 405)
    refused(server.client.post("/v1/completions", json=COMPLETION | {"model": "x" * 10_000}), 404)


def test_large_bodies(server: LiveServer) -> None:
    large = json.dumps({"prompt": "x" * (10 << 20)}).encode()
    error = refused(
        server.client.post("/v1/completions", content=large, headers={"content-type": "application/json"}), 413
    )
    assert "8388608" in error["message"]

    def pieces() -> Iterator[bytes]:  # no content-length
        for _ in range(10):
            yield b" " * (1 << 20)

    refused(server.client.post("/v1/completions", content=pieces()), 413)
    # Just below the limit it is read, and then too long a prompt.
    near = json.dumps({"prompt": "x" * ((8 << 20) - 100)}).encode()
    error = refused(server.client.post("/v1/completions", content=near, headers={"content-type": "application/json"}))
    assert error["code"] == "context_length_exceeded"
    ids = json.dumps({"prompt": [1] * 2_000_000 + ["x"]}).encode()
    refused(server.client.post("/v1/completions", content=ids, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("expect", ["", "expect: 100-continue\r\n"])
def test_a_length_over_the_limit_is_refused_before_the_body_comes(server: LiveServer, expect: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{expect}content-length: {(8 << 20) + 1}\r\n\r\n"
    with connect(server) as connection:
        start = time.monotonic()
        connection.sendall(head.encode())
        answer = b""
        while not answer.endswith(b"}}"):
            more = connection.recv(4096)
            assert more, answer
            answer += more
        assert time.monotonic() - start < 2
        assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer
        assert b"the body has more than 8388608 bytes" in answer


def connect(live: LiveServer) -> socket.socket:
    connection = socket.create_connection((live.host, live.port), timeout=10)
    connection.settimeout(10)
    return connection


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def test_slow_loris_is_cut_off(start_server: StartServer) -> None:
    live = start_server(request_timeout=0.3)
    with connect(live) as head, connect(live) as body, connect(live) as silent:
        head.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        body.sendall(request_bytes(COMPLETION)[:-10])
        start = time.monotonic()
        answer = b""
        while piece := body.recv(4096):
            answer += piece
        assert b"408 Request Timeout" in answer and b"did not arrive within 0.3 s" in answer
        for connection in (head, silent):
            while connection.recv(4096):
                pass
        assert time.monotonic() - start < 3
    # A slow reader is none: the head timer does not run while an answer is on its way.
    with connect(live) as reader:
        live.runner.step_seconds = 0.02
        reader.sendall(request_bytes({"prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True}))
        time.sleep(0.6)
        received = b""
        while b"[DONE]" not in received:
            more = reader.recv(65536)
            assert more, received
            received += more
    assert live.client.get("/health").status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_connections_cut_at_every_stage(server: LiveServer, is_streamed: bool) -> None:
    whole = request_bytes({"prompt": "cut me", "max_tokens": 900, "ignore_eos": True, "stream": is_streamed})
    server.runner.step_seconds = 0.001
    try:
        for stop in (0, 1, 10, 40, len(whole) // 2, len(whole) - 1):
            with connect(server) as connection:
                connection.sendall(whole[:stop])
        for delay in (0, 0.005, 0.05, 0.1):
            with connect(server) as connection:
                connection.sendall(whole)
                time.sleep(delay)
                if is_streamed and delay:
                    connection.recv(100)
        with connect(server) as connection:  # reset instead of a clean end
            connection.sendall(whole)
            time.sleep(0.02)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        server.wait_until_idle()
    finally:
        server.runner.step_seconds = 0.0
    # None of them ran to its end: 900 tokens each would have taken far more steps.
    assert server.engine.stats().num_running == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_disconnect_ends_the_generation_and_frees_its_pages(start_server: StartServer, is_streamed: bool) -> None:
    live = start_server()
    live.runner.step_seconds = 0.005
    with connect(live) as connection:
        connection.sendall(
            request_bytes({"prompt": "bye", "max_tokens": 1000, "ignore_eos": True, "stream": is_streamed})
        )
        deadline = time.monotonic() + 10
        while live.engine.stats().num_pages_in_use == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert live.engine.num_live == 1
    live.wait_until_idle(3)
    assert live.engine.stats().num_output_tokens < 900
    assert (
        'request_success_total{finished_reason="abort",model_name="fake-model"} 1.0' in live.client.get("/metrics").text
    )


def test_heads_without_end_are_cut_off(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        try:
            for index in range(200):
                connection.sendall(f"x-{index}: {'y' * 1000}\r\n".encode())
            connection.sendall(b"\r\n")
            answer = connection.recv(4096)
        except OSError:
            answer = b""
        assert b"200 OK" not in answer


def test_garbage_instead_of_http(server: LiveServer) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\r\n" * 1000, b"A" * 200_000):
        with connect(server) as connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except OSError:  # reset by the server
                pass


@pytest.mark.parametrize(
    "header", ["content-length: x", "content-length: -1", "content-length: \u0663", "transfer-encoding: chunked"]
)
def test_a_malformed_request_is_told_in_openais_shape(server: LiveServer, header: str) -> None:
    with connect(server) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{header}\r\n\r\nZZ\r\n".encode())
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"] == "this is no valid HTTP/1.1 request"


def test_a_thousand_requests_at_once(start_server: StartServer) -> None:
    """More than may wait: each is answered rightly or told to come back; none is lost."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        if hard < 4096:
            pytest.skip(f"{hard} open files are too few for 1,000 connections")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    live = start_server(FakeRunner(num_pages=128, max_model_len=256), max_num_seqs=16, max_queued=500)
    live.runner.gate.clear()
    refusals = 0

    async def ask(index: int) -> tuple[str, dict[str, Any]]:
        nonlocal refusals
        reader, writer = await asyncio.open_connection(live.host, live.port)
        writer.write(request_bytes({"prompt": f"request {index}", "max_tokens": 4, "temperature": 0}))
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        writer.close()
        refusals += " 503 " in head
        return head, body

    async def ask_all() -> list[tuple[str, dict[str, Any]]]:
        tasks = [asyncio.ensure_future(ask(index)) for index in range(1000)]
        deadline = time.monotonic() + 30
        while live.engine.num_live + refusals < 1000 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        live.runner.gate.set()
        return await asyncio.gather(*tasks)

    results = asyncio.run(ask_all())
    assert refusals == 1000 - 516
    for index, (head, body) in enumerate(results):
        if " 200 " in head.splitlines()[0]:
            assert body["choices"][0]["text"] == live.answer(f"request {index}", 4)
        else:
            assert " 503 " in head.splitlines()[0]
            assert "retry-after: 1" in head
            assert body["error"]["code"] == "queue_full"
    live.wait_until_idle()


def test_two_prompts_too_many_for_the_queue_are_a_clients_error(start_server: StartServer) -> None:
    live = start_server(max_num_seqs=2, max_queued=3)
    error = refused(live.client.post("/v1/completions", json={"prompt": ["a"] * 3, "n": 2}))
    assert "6 answers were asked for at once, at most 5" in error["message"]


def test_requests_from_many_threads_with_bad_ones_between(server: LiveServer) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            for index in range(6):
                prompt = f"{number}/{index}"
                client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
                body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
                if client.post("/v1/completions", json=body).json()["choices"][0]["text"] != server.answer(prompt, 6):
                    wrong.append(prompt)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
