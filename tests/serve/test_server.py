"""The HTTP API as clients see it, over real sockets."""

import asyncio
import json
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from live_server import EOS, LiveServer

from w4a4.configs.generation_config import PartialSampling


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_completion_is_the_greedy_answer(server: LiveServer, client: openai.OpenAI) -> None:
    completion = client.completions.create(model="fake-model", prompt="Once upon", max_tokens=24, temperature=0)
    assert completion.object == "text_completion"
    assert completion.choices[0].text == server.answer("Once upon", 24)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.total_tokens) == (
        9,
        9 + completion.usage.completion_tokens,
    )


def test_a_streamed_completion_is_the_same(server: LiveServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake-model",
        prompt="Once upon",
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == server.answer("Once upon", 24)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 9
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes[-1] in ("length", "stop") and set(finishes[:-1]) <= {None}


def test_chat_whole_and_streamed(server: LiveServer, client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hé?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    expected = server.answer("<system>Be brief.<user>Hé?<assistant>", 20)
    chat = client.chat.completions.create(model="fake-model", messages=messages, max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == expected
    assert chat.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model="fake-model", messages=messages, max_completion_tokens=20, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert all(chunk.usage is None for chunk in chunks)


def test_the_async_client_and_many_at_once(server: LiveServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model="fake-model", prompt=f"Number {i}", max_tokens=10 + i, temperature=0
                    )
                    for i in range(24)
                )
            )
            stream = await client.chat.completions.create(
                model="fake-model", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
            )
            assert len([chunk async for chunk in stream]) >= 2
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [server.answer(f"Number {i}", 10 + i) for i in range(24)]


def test_raw_events_end_with_done_and_begin_with_the_role(server: LiveServer, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="fake-model", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
    )
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = raw.http_response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in first
    assert len({json.loads(event[6:])["id"] for event in events[:-2]}) == 1


def test_n_choices_with_seeds(client: openai.OpenAI) -> None:
    def texts(**extra: object) -> list[str]:
        completion = client.completions.create(
            model="fake-model", prompt="dice", max_tokens=12, temperature=1.5, n=3, seed=7, **extra
        )
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        assert completion.usage is not None and completion.usage.prompt_tokens == 4
        return [choice.text for choice in completion.choices]

    first = texts()
    assert first == texts()
    assert len(set(first)) == 3
    streamed = ["", "", ""]
    for chunk in client.completions.create(
        model="fake-model", prompt="dice", max_tokens=12, temperature=1.5, n=3, seed=7, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first


def test_several_prompts_as_text_and_ids(server: LiveServer, client: openai.OpenAI) -> None:
    expected = [server.answer("one", 8), server.answer("two!", 8)]
    for prompt in (["one", "two!"], [list(b"one"), list(b"two!")]):
        completion = client.completions.create(model="fake-model", prompt=prompt, max_tokens=8, temperature=0)
        assert [choice.text for choice in completion.choices] == expected
        assert completion.usage is not None and completion.usage.prompt_tokens == 7


def test_echo_with_logprobs_scores_a_prompt_of_ids(server: LiveServer, client: openai.OpenAI) -> None:
    """What lm-eval's local-completions asks for."""
    import numpy as np
    import torch

    ids = list(b"perplexity")
    completion = client.completions.create(
        model="fake-model", prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    choice = completion.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert choice.text.startswith("perplexity")
    assert "".join(logprobs.tokens[:10]) == "perplexity"
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 11
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.text_offset is not None and logprobs.text_offset[:4] == [0, 1, 2, 3]
    for position in range(1, 10):
        expected = torch.log_softmax(server.runner.logits(np.array(ids[:position])), -1)
        assert logprobs.token_logprobs[position] == pytest.approx(expected[ids[position]].item(), abs=1e-5)
        best = max(logprobs.top_logprobs[position].items(), key=lambda pair: pair[1])
        assert best[1] == pytest.approx(expected.max().item(), abs=1e-5)
        assert logprobs.tokens[position] in logprobs.top_logprobs[position]
    # Scoring without generating; and the same in a stream.
    scored = client.completions.create(model="fake-model", prompt=ids, max_tokens=0, logprobs=1, echo=True)
    assert scored.choices[0].text == "perplexity"
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:10]  # type: ignore[union-attr]
    text, tokens = "", []
    for chunk in client.completions.create(
        model="fake-model", prompt=ids, max_tokens=2, logprobs=1, echo=True, stream=True, temperature=0
    ):
        text += chunk.choices[0].text
        tokens += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert text.startswith("perplexity") and len(tokens) == 12


def test_echo_without_logprobs(server: LiveServer, client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake-model", prompt="echo ", max_tokens=5, echo=True, temperature=0)
    assert whole.choices[0].text == "echo " + server.answer("echo ", 5)
    stream = client.completions.create(
        model="fake-model", prompt="echo ", max_tokens=5, echo=True, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_chat_logprobs_have_bytes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == chat.usage.completion_tokens  # type: ignore[union-attr]
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        if entry.token.startswith("bytes:"):
            assert entry.bytes is not None and entry.token == f"bytes:\\x{entry.bytes[0]:02x}"
        elif entry.bytes:
            assert bytes(entry.bytes).decode() == entry.token
    chunks = list(
        client.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            stream=True,
        )
    )
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [entry for piece in pieces if piece for entry in piece.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_stop_strings_and_stop_token_ids(server: LiveServer, client: openai.OpenAI) -> None:
    ids = server.runner.expected_answer(list(b"halt"), 30, frozenset({EOS}))
    stop_id = ids[6]
    completion = client.completions.create(
        model="fake-model", prompt="halt", max_tokens=30, temperature=0, extra_body={"stop_token_ids": [stop_id]}
    )
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].model_extra == {"stop_reason": stop_id}
    text = server.answer("halt", 30)
    stop = next(text[i : i + 2] for i in range(4, 29) if text[i : i + 2].isascii())
    completion = client.completions.create(
        model="fake-model", prompt="halt", max_tokens=30, temperature=0, stop=["never seen", stop]
    )
    assert completion.choices[0].text == text[: text.index(stop)]
    assert completion.choices[0].finish_reason == "stop"


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=6,
            stream=True,
            extra_body={
                "ignore_eos": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts) and counts[-1] == 6


def test_models_version_and_health(server: LiveServer, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fake-model"
    assert client.models.retrieve("fake-model").id == "fake-model"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist; this server has 'fake-model'"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    about = server.client.get("/version").json()
    assert (about["model"], about["path"], about["device"]) == ("fake-model", "fake", "cpu")
    assert server.client.get("/health").json() == {"status": "ok"}


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    answer = server.client.post("/tokenize", json={"prompt": "hé<eos>", "return_token_strs": True}).json()
    assert answer["tokens"] == [104, 195, 169, 257]
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert (answer["count"], answer["max_model_len"]) == (4, 1024)
    assert server.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé<eos>"}
    chat = server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "q"}]}).json()
    assert bytes(chat["tokens"]).decode() == "<user>q<assistant>"
    assert server.client.post("/detokenize", json={"tokens": [300]}).status_code == 400
    assert server.client.post("/tokenize", json={"prompt": "a", "messages": []}).status_code == 400


def test_metrics_count_what_happened(server: LiveServer) -> None:
    def read() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    server.wait_until_idle()
    before = read()
    body = {"prompt": "measure me", "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    after = read()
    label = '{model_name="fake-model"}'

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown(f"w4a4:prompt_tokens_total{label}") == 10
    assert grown(f"w4a4:generation_tokens_total{label}") == 7
    assert grown('w4a4:request_success_total{finished_reason="length",model_name="fake-model"}') == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"w4a4:{name}_count{label}") == 1
    assert after[f"w4a4:num_requests_running{label}"] == 0
    assert after[f"w4a4:kv_cache_usage_perc{label}"] == 0


def test_the_page_runs_only_its_own_script(server: LiveServer) -> None:
    response = server.client.get("/")
    assert "text/html" in response.headers["content-type"]
    assert "script-src 'sha256-" in response.headers["content-security-policy"]
    assert "http://" not in response.text and "https://" not in response.text


def test_cors_is_off_unless_asked_for(server: LiveServer, start_server: object) -> None:
    headers = {"origin": "https://example.com"}
    assert "access-control-allow-origin" not in server.client.get("/health", headers=headers).headers
    open_server = start_server(allow_origins=("https://example.com",))  # type: ignore[operator]
    allowed = open_server.client.get("/health", headers=headers).headers
    assert allowed["access-control-allow-origin"] == "https://example.com"
    preflight = open_server.client.options(
        "/v1/completions", headers={**headers, "access-control-request-method": "POST"}
    )
    assert preflight.status_code == 200


def test_api_keys(start_server: object) -> None:
    live = start_server(api_keys=("first-key", "second-key"))  # type: ignore[operator]
    body = {"prompt": "x", "max_tokens": 1}
    for key, status in (("first-key", 200), ("second-key", 200), ("first", 401), ("first-keyX", 401), ("-", 401)):
        response = httpx.post(live.url + "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status, key
    response = httpx.post(live.url + "/v1/completions", json=body)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    for path, status in (("/health", 200), ("/", 200), ("/version", 401), ("/metrics", 401), ("/v1/models", 401)):
        assert httpx.get(live.url + path).status_code == status, path


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "person",
                "schema": {
                    "type": "object",
                    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
                    "required": ["age", "ok"],
                    "additionalProperties": False,
                },
            },
        },
    ],
)
def test_structured_answers_parse(client: openai.OpenAI, response_format: dict[str, object]) -> None:
    pytest.importorskip("xgrammar")
    for seed in range(3):
        chat = client.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "as JSON"}],
            response_format=response_format,  # type: ignore[arg-type]
            max_tokens=400,
            seed=seed,
            # A random model closes brackets too rarely.
            logit_bias={str(ord("}")): 20, str(ord('"')): 6},
        )
        if response_format["type"] == "json_schema":
            assert chat.choices[0].finish_reason == "stop"
            value = json.loads(chat.choices[0].message.content or "")
            assert set(value) == {"age", "ok"} and isinstance(value["ok"], bool)
        elif chat.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)


def test_the_models_sampling_defaults_hold_where_a_request_says_nothing(
    start_server: Callable[..., LiveServer],
) -> None:
    def text(live: LiveServer, path: str = "/v1/completions", **body: object) -> str:
        body = {"max_tokens": 12, "ignore_eos": True, "seed": 3} | body
        choice = live.client.post(path, json=body).json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    plain = start_server()
    greedy = plain.answer("dice", 12)
    assert text(plain, prompt="dice") != greedy  # OpenAI's default: temperature 1
    live = start_server(sampling=PartialSampling(temperature=0.0))
    assert text(live, prompt="dice") == greedy
    messages = [{"role": "user", "content": "dice"}]
    assert text(live, "/v1/chat/completions", messages=messages) == live.answer("<user>dice<assistant>", 12)
    assert text(live, prompt="dice", temperature=1.0) == text(plain, prompt="dice")
    live = start_server(sampling=PartialSampling(temperature=1.0, top_k=1, top_p=0.9, min_p=0.0))
    assert text(live, prompt="dice") == greedy
    assert text(live, prompt="dice", top_k=0, top_p=1.0) == text(plain, prompt="dice")
    live = start_server(sampling=PartialSampling(repetition_penalty=1.5))
    assert text(live, prompt="dice", temperature=0) == text(plain, prompt="dice", temperature=0, repetition_penalty=1.5)
    assert text(live, prompt="dice", temperature=0, repetition_penalty=1.0) == greedy
