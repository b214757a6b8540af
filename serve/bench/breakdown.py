"""Where a decode step's time goes: kernel times from the profiler, by what the kernel is for, and the rest.

The step itself is timed without the profiler. What the kernels' sum leaves of it is the gap: launches inside the graph,
and waits of one kernel for the last block of another. Kernels that overlap count twice, so the gap may be negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from w4a4.serve.bench.fixed_batch import FixedBatch
from w4a4.serve.bench.timing import measure
from w4a4.serve.model import CausalLM

STEPS = 4

# Part of a step -> pattern of its kernels' names; the first that matches counts.
PARTS: tuple[tuple[str, str], ...] = (
    ("attention", r"kv4_?decode|Kv4Decode|_attend_split|_merge_splits|flash|fmha|attention"),
    ("KV write", r"kv4_?write|Kv4Write|kv_write"),
    ("quantise", r"quantize|Quantize|_rmsnorm|_silu_mul|_quantize_row"),
    ("linears", r"w4ax|W4Ax|gemm_sm90|Gemm|_scaled_mm|f8f8|e4m3|^_product$"),
    ("head and float linears", r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitK"),
    ("sampling", r"argmax|ArgMax|reduce_kernel"),
)
OTHER = "other"


@dataclass(frozen=True)
class Breakdown:
    """One decode step. microseconds: per part, all its kernels; step_us: measured without the profiler."""

    candidate: str
    batch: int
    context: int
    step_us: float
    microseconds: dict[str, float]
    launches: dict[str, int]
    kernels: dict[str, tuple[float, int]]

    @property
    def gap_us(self) -> float:
        return self.step_us - sum(self.microseconds.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidate": self.candidate,
            "batch": self.batch,
            "context": self.context,
            "step_us": round(self.step_us, 1),
            "parts_us": {name: round(value, 1) for name, value in self.microseconds.items()},
            "gap_us": round(self.gap_us, 1),
            "launches": self.launches,
            "kernels": [
                {"name": name[:120], "us": round(us, 1), "launches": count}
                for name, (us, count) in sorted(self.kernels.items(), key=lambda item: -item[1][0])[:16]
            ],
        }


def part_of(kernel: str) -> str:
    """Which part of a step a kernel belongs to, by its name."""
    return next((part for part, pattern in PARTS if re.search(pattern, kernel)), OTHER)


def sum_up(
    events: Iterable[tuple[str, float]], steps: int
) -> tuple[dict[str, float], dict[str, int], dict[str, tuple[float, int]]]:
    """(kernel name, microseconds) of `steps` steps -> per step: time and launches of each part, and of each kernel."""
    kernels: dict[str, list[float]] = {}
    for name, us in events:
        kernels.setdefault(name, []).append(us)
    microseconds: dict[str, float] = {}
    launches: dict[str, int] = {}
    for name, times in kernels.items():
        part = part_of(name)
        microseconds[part] = microseconds.get(part, 0.0) + sum(times) / steps
        launches[part] = launches.get(part, 0) + round(len(times) / steps)
    own = {name: (sum(times) / steps, round(len(times) / steps)) for name, times in kernels.items()}
    return dict(sorted(microseconds.items(), key=lambda item: -item[1])), launches, own


def decode_breakdown(model: CausalLM, candidate: str, batch: int, context: int) -> Breakdown:
    """Profile decode steps of `batch` sequences at `context` tokens on a GPU."""
    run = FixedBatch(model, batch, context + 2 * STEPS)
    run.seek(context)
    timing = measure(lambda: run.decode(STEPS), model.device, 3, setup=lambda: run.seek(context))
    run.seek(context)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run.decode(STEPS)
        torch.cuda.synchronize()
    events = [
        (event.name, float(event.time_range.elapsed_us()))
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    ]
    microseconds, launches, kernels = sum_up(events, STEPS)
    return Breakdown(candidate, batch, context, 1e6 * timing.median / STEPS, microseconds, launches, kernels)
