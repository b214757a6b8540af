"""Load on a real server around the fake model, and the arithmetic of what it reports."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from w4a4.configs.errors import NotFoundError, UsageError, W4A4Error
from w4a4.serve.bench.server_load import Answer, Load, LoadResult, lengths, parse_goodput, run_load, summary

sys.path.insert(0, str(Path(__file__).parent.parent))


def test_a_server_under_load() -> None:
    from fake_runner import FakeRunner
    from live_server import LiveServer

    server = LiveServer(FakeRunner(num_pages=256, max_model_len=256, step_seconds=0.001))
    try:
        load = Load(server.url, 6, seq=20, gen=5, rate=500.0, goodput={"ttft": 60_000.0}, vocabulary=(3, 250))
        values = run_load(load).to_dict()
        with pytest.raises(W4A4Error, match="no request was answered: status 404"):
            run_load(Load(server.url, 1, 5, 5, float("inf"), {}, model="another"))
    finally:
        server.stop()
    assert (values["completed"], values["failed"], values["num_prompts"]) == (6, 0, 6)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (120, 30)
    assert values["output_throughput"] == pytest.approx(30 / values["duration"], rel=1e-3)
    assert values["request_goodput"] == pytest.approx(6 / values["duration"], rel=1e-3)
    assert 0 < values["median_ttft_ms"] <= values["median_e2el_ms"]
    assert values["mean_tpot_ms"] > 0.5  # the model sleeps 1 ms a step


def test_measures_of_known_answers() -> None:
    answers = (
        Answer(10, 5, ttft=0.1, gaps=[0.01, 0.02, 0.03, 0.04], latency=0.2),
        Answer(20, 1, ttft=0.4, gaps=[], latency=0.4),
        Answer(30, 0, error="status 503"),
    )
    load = Load("http://x", 3, 10, 5, float("inf"), {"ttft": 200.0, "tpot": 50.0})
    values = LoadResult(load, "m", 2.0, answers).to_dict()
    assert (values["completed"], values["failed"]) == (2, 1)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (30, 6)
    assert values["output_throughput"] == 3.0 and values["request_throughput"] == 1.0
    assert values["request_goodput"] == 0.5
    assert values["mean_tpot_ms"] == 25.0  # of the one answer with more than one token
    assert values["median_itl_ms"] == 25.0 and values["mean_ttft_ms"] == 250.0
    assert values["request_rate"] == "inf"


def test_percentile_is_interpolated() -> None:
    values = summary("itl", [index / 1e3 for index in range(101)])
    assert values["p99_itl_ms"] == 99.0 and values["median_itl_ms"] == 50.0
    assert summary("itl", []) == {}


def test_goodput_limits() -> None:
    assert parse_goodput("ttft:500,tpot:40.5") == {"ttft": 500.0, "tpot": 40.5}
    assert parse_goodput("") == {}
    for text in ("ttft", "ttft:x", "itl:5", "ttft:-1"):
        with pytest.raises(UsageError, match="is not a limit"):
            parse_goodput(text)


def test_lengths_of_conversations_vary_and_stay_within_the_limits() -> None:
    load = Load("http://x", 1, seq=500, gen=200, rate=float("inf"), goodput={}, dataset="chat")
    generator = random.Random(1)
    prompts, answers = zip(*(lengths(load, generator) for _ in range(2000)), strict=True)
    assert min(prompts) >= 4 and max(prompts) == 500 and max(answers) == 200
    assert 100 < sum(prompts) / 2000 < 200 and 90 < sum(answers) / 2000 < 150
    assert len(set(prompts)) > 200
    fixed = Load("http://x", 1, seq=500, gen=200, rate=float("inf"), goodput={})
    assert lengths(fixed, generator) == (500, 200)


def test_no_server() -> None:
    with pytest.raises(NotFoundError, match="no server answers"):
        run_load(Load("http://127.0.0.1:9", 1, 5, 5, float("inf"), {}))
