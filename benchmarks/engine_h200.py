"""The engine on a GPU: steady decoding beside its captured step, and many requests at once. A part of bench_h200.py.

Prompts are random tokens. Every step is timed where the engine calls the runner; in steady decoding the profiler then
tells how long kernels are at work.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from w4a4.serve.bench.breakdown import sum_up
from w4a4.serve.bench.fixed_batch import FixedBatch
from w4a4.serve.bench.timing import measure
from w4a4.serve.engine import Engine, EngineConfig
from w4a4.serve.model import CausalLM
from w4a4.serve.model_runner import ModelRunner
from w4a4.serve.request import Output, Request, SamplingParams
from w4a4.serve.runner import Batch, LayerPlan

PROMPT = 1024
STEADY = ((1, 0.0), (16, 0.0), (64, 0.0), (64, 0.8))  # sequences and temperature
STEADY_STEPS = 150
PROFILED_STEPS = 20
REQUESTS, OUTPUT = 256, 512
BUDGET = 8192  # tokens of a step


class TimedRunner:
    """A runner that remembers when each step was asked for, and of how many sequences and tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self.info, self._runner = runner.info, runner
        self.steps: list[tuple[float, int, int]] = []

    def step(self, batch: Batch) -> Tensor:
        self.steps.append((time.perf_counter(), batch.num_seqs, batch.num_tokens))
        return self._runner.step(batch)

    def explain(self) -> list[LayerPlan]:
        return self._runner.explain()

    def close(self) -> None:
        pass  # its model goes on


class Load:
    """Requests on an engine of their own. Use: `with Load(...) as load: ... load.wait()`."""

    def __init__(self, runner: TimedRunner, count: int, output: int, temperature: float = 0.0) -> None:
        self.runner = runner
        self._finished = threading.Semaphore(0)
        config = EngineConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=BUDGET, is_prefix_caching=False)
        self.engine = Engine(runner, _text, config, self._listen)
        draw = random.Random(count)
        params = SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True)
        vocabulary = runner.info.vocab_size
        self.requests = [
            Request(f"r{i}", tuple(draw.randrange(vocabulary) for _ in range(PROMPT)), params) for i in range(count)
        ]

    def __enter__(self) -> Load:
        self.runner.steps.clear()
        self.engine.start()
        self.start = time.perf_counter()
        self.engine.submit(self.requests)
        return self

    def wait(self) -> float:
        """Seconds from the first request to the last token."""
        for _ in self.requests:
            self._finished.acquire()
        return time.perf_counter() - self.start

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    def _listen(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._finished.release()


def _text(ids: list[int], _: bool) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


def measure_engine(model: CausalLM) -> dict[str, Any]:
    """What stands under `engine` in bench-h200.json."""
    runner = TimedRunner(
        ModelRunner(
            model, max_num_seqs=REQUESTS, max_num_batched_tokens=BUDGET, max_model_len=PROMPT + OUTPUT,
            gpu_memory_utilization=0.7,
        )
    )  # fmt: skip
    with Load(runner, 8, 4) as load:
        load.wait()
    requests = measure_requests(runner)
    steady = [measure_steady(model, runner, count, temperature) for count, temperature in STEADY]
    what = "8B shape, prompts of 1,024 tokens, through scheduler, sampler and detokeniser; step without the profiler, "
    return {"what": what + "kernels with it", "steady": steady, "requests": requests}


def measure_requests(runner: TimedRunner) -> dict[str, Any]:
    with Load(runner, REQUESTS, OUTPUT) as load:
        seconds = load.wait()
        stats = load.engine.stats()
    steps = runner.steps
    full = [at - load.start for at, seqs, tokens in steps if seqs == tokens == REQUESTS]
    chunks = [(at, tokens) for at, seqs, tokens in steps if tokens > seqs]
    intervals = [b - a for a, b in zip(full, full[1:], strict=False)]
    found = {
        "requests": REQUESTS, "prompt": PROMPT, "output": OUTPUT, "seconds": round(seconds, 3),
        "steps": stats.num_steps, "tok_s": round(REQUESTS * OUTPUT / seconds, 1),
        "busy": round(stats.busy_seconds, 3), "runner": round(stats.runner_seconds, 3),
        "chunk_steps": len(chunks), "chunk_tokens": sum(tokens for _, tokens in chunks),
        "all_decode": {"first_s": round(full[0], 3), "last_s": round(full[-1], 3), "steps": len(full),
                       "median_ms": round(1e3 * statistics.median(intervals), 3)},
    }  # fmt: skip
    print(found, flush=True)
    return found


def graph_step(model: CausalLM, count: int) -> float:
    """Seconds of the captured step alone."""
    run = FixedBatch(model, count, PROMPT + 64)

    def seek() -> None:
        run.seek(PROMPT)

    return measure(lambda: run.decode(16), model.device, 3, setup=seek).median / 16


def measure_steady(model: CausalLM, runner: TimedRunner, count: int, temperature: float) -> dict[str, Any]:
    alone = graph_step(model, count)
    with Load(runner, count, STEADY_STEPS + 4 * PROFILED_STEPS + 20, temperature) as load:
        _wait_for_steps(runner, count, STEADY_STEPS)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            _wait_for_steps(runner, count, STEADY_STEPS + 2 * PROFILED_STEPS)
        load.wait()
    full = [at for at, seqs, tokens in runner.steps if seqs == tokens == count]
    steps = [b - a for a, b in zip(full[10:STEADY_STEPS], full[11:STEADY_STEPS], strict=False)]
    spans = sorted(
        (float(event.time_range.start), float(event.time_range.end), event.name)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    found: dict[str, Any] = {
        "batch": count, "sampling": f"temperature {temperature:g}" if temperature else "greedy",
        "step_ms": round(1e3 * statistics.fmean(steps), 4), "step_ms_median": round(1e3 * statistics.median(steps), 4),
        "graph_step_ms": round(1e3 * alone, 4),
    }  # fmt: skip
    if spans:
        window, busy = max(end for _, end, _ in spans) - spans[0][0], union((a, b) for a, b, _ in spans)
        profiled = 1e3 * statistics.median(b - a for a, b in zip(full[-60:-20], full[-59:-20], strict=False))
        num_steps = window / 1e3 / profiled
        parts, *_ = sum_up([(name, end - start) for start, end, name in spans], 1)
        found |= {
            "profiled_step_ms": round(profiled, 4),
            "kernel_sum_ms": round(sum(end - start for start, end, _ in spans) / num_steps / 1e3, 4),
            "kernel_busy_ms": round(busy / num_steps / 1e3, 4),
            "idle": round(1 - busy / window, 4),
            "parts_us": {name: round(us / num_steps, 1) for name, us in parts.items()},
        }
    print(found, flush=True)
    return found


def _wait_for_steps(runner: TimedRunner, count: int, wanted: int) -> None:
    while sum(seqs == tokens == count for _, seqs, tokens in runner.steps) < wanted:
        time.sleep(0.002)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans, ordered by their start, lasts."""
    total, reach = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
