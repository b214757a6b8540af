"""What scheduler, sampler and HTTP cost beside the model, with 64 requests decoding at once.

`gap_ms` is how long a device would be idle in each step: from the end of its work to the runner's next call, 0 where
that came before. The device is a clock here: the runner returns ready logits at once, as on a GPU, each step takes the
device `--step-ms` after the one before, as long as a large model's step, and only then the host sees the tokens. Once
for the engine alone and once with 64 streams over HTTP, whose clients are a process of their own. Median over all
decoding steps, so that others on the machine disturb it little; p90 beside it.

`stream_loss` is what is lost of the tokens per second of a tiny random model on this CPU when 64 clients stream,
against the engine alone: the median over rounds that take turns. `cpu_ms` is processor time of this process per step.

    python benchmarks/engine_overhead.py --json overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "serve"))

from live_server import LiveServer  # noqa: E402

from w4a4.configs.architecture import ModelConfig  # noqa: E402
from w4a4.serve.engine import Engine, EngineConfig  # noqa: E402
from w4a4.serve.model import CausalLM  # noqa: E402
from w4a4.serve.model_runner import ModelRunner  # noqa: E402
from w4a4.serve.random_weights import RandomModel  # noqa: E402
from w4a4.serve.request import Output, Request, SamplingParams  # noqa: E402
from w4a4.serve.request import Sequence as EngineSequence  # noqa: E402
from w4a4.serve.runner import Batch, LayerPlan, Runner, RunnerInfo  # noqa: E402
from w4a4.serve.sampler import PendingTokens, Sampled, Sampler  # noqa: E402

PROMPT_LENGTH = 100
VOCAB_SIZE = 256


class ReadyRunner:
    """Returns logits that were made before; its device works on each call for `step_seconds`, one after the other."""

    def __init__(self, step_seconds: float, num_seqs: int) -> None:
        self.info = RunnerInfo(
            num_pages=num_seqs * 40,
            page_size=16,
            num_sink_slots=0,
            vocab_size=VOCAB_SIZE,
            max_model_len=512,
            path="none",
            is_asynchronous=True,
        )
        self._step_seconds = step_seconds
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(4 * num_seqs, VOCAB_SIZE, generator=generator)
        self._logits[:, 128:] = -torch.inf  # ASCII: every token is text that can be sent at once
        self._num_steps = 0
        self._num_seqs = num_seqs
        self.done = 0.0  # when the device has finished what it was given
        self.gaps: list[float] = []  # seconds, of steps in which everyone decodes

    def step(self, batch: Batch) -> Tensor:
        now = time.perf_counter()
        if batch.is_decode and batch.num_seqs == self._num_seqs and self.done:
            self.gaps.append(max(0.0, now - self.done))
        self.done = max(now, self.done) + self._step_seconds
        self._num_steps += 1
        first = self._num_steps % 64
        return self._logits[first : first + batch.logit_rows.shape[0]].clone()

    def explain(self) -> list[LayerPlan]:
        return []

    def close(self) -> None:
        pass


class LateTokens(PendingTokens):
    """Tokens that the host sees when the clock says so."""

    def __init__(self, pending: PendingTokens, at: float) -> None:
        self.tokens = pending.tokens
        self._pending = pending
        self._at = at

    def results(self) -> list[Sampled]:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self._pending.results()


class WaitingSampler(Sampler):
    """The engine's sampler, whose tokens are there when the runner's device has finished."""

    def __init__(self, runner: ReadyRunner) -> None:
        super().__init__(VOCAB_SIZE)
        self._runner = runner

    def sample_later(self, logits: Tensor, sequences: Sequence[EngineSequence]) -> PendingTokens:
        return LateTokens(super().sample_later(logits, sequences), self._runner.done)


def wait_for_device(engine: Engine, runner: Runner) -> None:
    if isinstance(runner, ReadyRunner):
        engine._sampler = WaitingSampler(runner)


class TimedRunner:
    """A runner whose calls are timed: `intervals` are seconds from one call to the next where everyone decodes."""

    def __init__(self, runner: Runner, num_seqs: int) -> None:
        self.info = runner.info
        self._runner = runner
        self._num_seqs = num_seqs
        self._called = 0.0
        self.intervals: list[float] = []

    def step(self, batch: Batch) -> Tensor:
        now = time.perf_counter()
        is_full = batch.is_decode and batch.num_seqs == self._num_seqs
        if is_full and self._called:
            self.intervals.append(now - self._called)
        self._called = now if is_full else 0.0
        return self._runner.step(batch)

    def explain(self) -> list[LayerPlan]:
        return self._runner.explain()

    def close(self) -> None:
        self._runner.close()


def tiny_runner(num_seqs: int) -> Runner:
    """A random llama that decodes 64 sequences on a CPU in tens of milliseconds."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=128,  # ASCII
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        sliding_windows=(None, None),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    device = torch.device("cpu")
    model = CausalLM(RandomModel(config, device), device, "map", 4)
    return TimedRunner(ModelRunner(model, max_num_seqs=num_seqs, kv_cache_bytes=1 << 28), num_seqs)


def measure_alone(runner: Runner, num_seqs: int, num_tokens: int) -> dict[str, float]:
    """Tokens per second and milliseconds per decoding step of the engine without a server."""
    finished = threading.Semaphore(0)

    def listen(outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                finished.release()

    config = EngineConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * PROMPT_LENGTH, is_prefix_caching=False
    )
    engine = Engine(runner, lambda ids, _: bytes(i % 128 for i in ids).decode(), config, listen)
    wait_for_device(engine, runner)
    engine.start()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompt = tuple(i % 100 for i in range(PROMPT_LENGTH))
    start, start_cpu = time.perf_counter(), time.process_time()
    engine.submit([Request(f"r{index}", prompt, params) for index in range(num_seqs)])
    for _ in range(num_seqs):
        finished.acquire()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    stats = engine.stats()
    engine.shutdown()
    return {
        "tokens_per_second": num_seqs * num_tokens / seconds,
        "cpu_ms": 1e3 * cpu_seconds / stats.num_steps,
        **gaps_of(runner),
    }


def read_streams(port: int, num_seqs: int, num_tokens: int, started: Any, results: Any) -> None:
    """In a process of its own: open the streams, read them to their end, report when it began and ended."""

    async def read(body: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        count, tail = 0, b""
        while b"[DONE]" not in tail:
            piece = await reader.read(1 << 16)
            if not piece:
                raise ConnectionError("a stream ended without [DONE]")
            count += piece.count(b"data: ")
            tail = (tail + piece)[-32:]
        writer.close()
        return count

    async def read_all() -> None:
        prompt = [i % 100 for i in range(PROMPT_LENGTH)]
        request = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(request).encode()
        started.set()
        start = time.perf_counter()
        counts = await asyncio.gather(*(read(body) for _ in range(num_seqs)))
        results.put((time.perf_counter() - start, sum(counts)))

    asyncio.run(read_all())


def measure_served(runner: Runner, num_seqs: int, num_tokens: int) -> dict[str, float]:
    """The same through HTTP streams."""
    live = LiveServer(
        runner,  # type: ignore[arg-type]
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * PROMPT_LENGTH,
        is_prefix_caching=False,
        request_timeout=60.0,
    )
    wait_for_device(live.engine, runner)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    started = context.Event()
    client = context.Process(target=read_streams, args=(live.port, num_seqs, num_tokens, started, results))
    client.start()
    started.wait(60)
    start_cpu = time.process_time()
    seconds, num_events = results.get(timeout=300)
    cpu_seconds = time.process_time() - start_cpu
    client.join(10)
    stats = live.engine.stats()
    live.stop()
    return {
        "tokens_per_second": num_seqs * num_tokens / seconds,
        "cpu_ms": 1e3 * cpu_seconds / stats.num_steps,
        "events_per_token": num_events / (num_seqs * num_tokens),
        **gaps_of(runner),
    }


def gaps_of(runner: Runner) -> dict[str, float]:
    if isinstance(runner, TimedRunner):
        return {"step_ms": 1e3 * statistics.median(runner.intervals)}
    if not isinstance(runner, ReadyRunner):
        return {}
    gaps = sorted(runner.gaps)
    return {"gap_ms": 1e3 * gaps[len(gaps) // 2], "gap_p90_ms": 1e3 * gaps[len(gaps) * 9 // 10]}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the other core is the clients'
    seqs, tokens, rounds = arguments.seqs, arguments.tokens, arguments.rounds
    sleep = arguments.step_ms / 1e3
    engine = [measure_alone(ReadyRunner(sleep, seqs), seqs, tokens) for _ in range(rounds)]
    server = [measure_served(ReadyRunner(sleep, seqs), seqs, tokens) for _ in range(rounds)]
    alone, served = [], []
    for _ in range(rounds):
        alone.append(measure_alone(tiny_runner(seqs), seqs, tokens // 2))
        served.append(measure_served(tiny_runner(seqs), seqs, tokens // 2))
    record: dict[str, Any] = {
        "seqs": seqs,
        "tokens": tokens,
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "engine_alone": medians(engine),
        "with_server": medians(server),
        "tiny_alone": medians(alone),
        "tiny_served": medians(served),
    }
    record["stream_loss"] = round(1 - record["tiny_alone"]["step_ms"] / record["tiny_served"]["step_ms"], 4)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
