"""Load on an OpenAI-compatible server: time to first token, time per token, and how many requests keep their promises.

Requests stream `/v1/completions` with prompts of random token ids, each on a connection of its own. Arrivals are
a Poisson process, or all at once. Result keys are those of vLLM's `bench serve`, so that its tools read them.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from w4a4.configs.errors import NotFoundError, UsageError, W4A4Error

TIMEOUT_SECONDS = 600.0
VOCABULARY = (256, 30_000)
"""Prompt token ids are drawn from this range, which every common vocabulary covers, unless the server's is smaller."""

Dataset = Literal["random", "chat"]


@dataclass(frozen=True)
class Load:
    """What to send. rate: requests per second, inf = all at once. goodput: measure -> limit in ms.

    dataset: "random": `seq` prompt tokens and `gen` answer tokens each. "chat": lengths drawn from log-normal
    distributions of about the means and spread of ShareGPT's conversations, cut at `seq` and `gen`.
    """

    url: str
    num_requests: int
    seq: int
    gen: int
    rate: float
    goodput: dict[str, float]
    model: str | None = None
    dataset: Dataset = "random"
    seed: int = 0
    vocabulary: tuple[int, int] = VOCABULARY


@dataclass
class Answer:
    """One request as the client saw it; seconds."""

    num_prompt: int
    num_output: int = 0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass(frozen=True)
class LoadResult:
    load: Load
    model: str
    duration: float
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict[str, Any]:
        done = [answer for answer in self.answers if not answer.error]
        num_input = sum(answer.num_prompt for answer in done)
        num_output = sum(answer.num_output for answer in done)
        result: dict[str, Any] = {
            "backend": "openai",
            "model_id": self.model,
            "num_prompts": len(self.answers),
            "request_rate": "inf" if self.load.rate == float("inf") else self.load.rate,
            "duration": round(self.duration, 6),
            "completed": len(done),
            "failed": len(self.answers) - len(done),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": round(len(done) / self.duration, 4),
            "output_throughput": round(num_output / self.duration, 3),
            "total_token_throughput": round((num_input + num_output) / self.duration, 3),
        }
        if self.load.goodput:
            good = sum(self._is_good(answer) for answer in done)
            result["request_goodput"] = round(good / self.duration, 4)
        measures = {
            "ttft": [answer.ttft for answer in done],
            "tpot": [answer.tpot for answer in done if answer.num_output > 1],
            "itl": [gap for answer in done for gap in answer.gaps],
            "e2el": [answer.latency for answer in done],
        }
        for name, seconds in measures.items():
            result |= summary(name, seconds)
        return result

    def _is_good(self, answer: Answer) -> bool:
        seen = {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.latency}
        return all(1e3 * seen[name] <= limit for name, limit in self.load.goodput.items())


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """mean, median, standard deviation and 99th percentile in ms; empty without values."""
    if not seconds:
        return {}
    ordered = sorted(1e3 * value for value in seconds)
    rank = (len(ordered) - 1) * 0.99
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    values = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered),
        f"p99_{name}_ms": ordered[low] + (ordered[high] - ordered[low]) * (rank - low),
    }
    return {key: round(value, 3) for key, value in values.items()}


def parse_goodput(text: str) -> dict[str, float]:
    """ "ttft:500,tpot:50" -> limits in ms. Raises UsageError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text else []:
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value) if value.isascii() else -1.0
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < limits[name] < math.inf:
            raise UsageError(f"--goodput {text}: {part!r} is not a limit", "--goodput ttft:500,tpot:50 (milliseconds)")
    return limits


def run_load(load: Load) -> LoadResult:
    """Send everything and wait for the last answer.

    Raises:
        NotFoundError: no server at the URL, or it serves no model.
        W4A4Error: no request was answered.
    """
    model = load.model or served_model(load.url)
    generator = random.Random(load.seed)
    shapes = [lengths(load, generator) for _ in range(load.num_requests)]
    answers = [Answer(num_prompt) for num_prompt, _ in shapes]
    threads = []
    begin = time.perf_counter()
    due = begin
    for answer, (num_prompt, num_output) in zip(answers, shapes, strict=True):
        prompt = [generator.randrange(*load.vocabulary) for _ in range(num_prompt)]
        body = {"model": model, "prompt": prompt, "max_tokens": num_output, "temperature": 0.0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        thread = threading.Thread(target=_ask, args=(load.url, body, answer), daemon=True)
        time.sleep(max(0.0, due - time.perf_counter()))
        thread.start()
        threads.append(thread)
        if load.rate != float("inf"):
            due += generator.expovariate(load.rate)
    for thread in threads:
        thread.join()
    result = LoadResult(load, model, time.perf_counter() - begin, tuple(answers))
    if all(answer.error for answer in answers):
        raise W4A4Error(f"no request was answered: {answers[0].error}", f"is {load.url} the right server?")
    return result


def served_model(url: str) -> str:
    """The first model that the server lists."""
    try:
        with _connect(url) as connection:
            connection.request("GET", f"{_prefix(url)}/v1/models")
            document = json.loads(connection.getresponse().read())
        return str(document["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise NotFoundError(f"no server answers at {url}: {error}", "w4a4 serve DIR") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise NotFoundError(f"{url} lists no models at /v1/models", "give the server's base URL") from error


def lengths(load: Load, generator: random.Random) -> tuple[int, int]:
    """Prompt and answer tokens of the next request."""
    if load.dataset == "random":
        return load.seq, load.gen
    num_prompt, num_output = generator.lognormvariate(4.8, 1.1), generator.lognormvariate(4.9, 0.9)
    return max(4, min(load.seq, round(num_prompt))), max(4, min(load.gen, round(num_output)))


def _connect(url: str) -> closing[http.client.HTTPConnection]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--server {url} is not an http URL", "--server http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return closing(kind(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS))


def _prefix(url: str) -> str:
    return urlsplit(url).path.rstrip("/").removesuffix("/v1")


def _ask(url: str, body: dict[str, Any], answer: Answer) -> None:
    begin = time.perf_counter()
    try:
        with _connect(url) as connection:
            path, headers = f"{_prefix(url)}/v1/completions", {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    text = response.read()[:300].decode(errors="replace")
                    answer.error = f"status {response.status}: {text}"
                else:
                    _read_stream(response, begin, answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"


def _read_stream(response: http.client.HTTPResponse, begin: float, answer: Answer) -> None:
    """Server-sent events: the time of each chunk with text, the counts of the last one's usage."""
    last = begin
    is_done = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            break
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])[:300]
            return
        usage = event.get("usage")
        if usage:
            answer.num_output, answer.num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        if event.get("choices"):
            now = time.perf_counter()
            if answer.ttft:
                answer.gaps.append(now - last)
            else:
                answer.ttft = now - begin
            answer.latency = now - begin
            last = now
    if not is_done:
        answer.error = "the stream ended without [DONE]"
