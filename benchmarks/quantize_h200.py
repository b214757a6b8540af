"""Times the quantise kernels on a Hopper GPU against its copy bandwidth: writes results/quantize-h200.json.

    python benchmarks/quantize_h200.py --out benchmarks/results/quantize-h200.json
    python benchmarks/quantize_h200.py --compile FOLDER      # fills a kernel cache; needs no GPU

Cold L2 (inputs and outputs rotate through more than 400 MB), random data, CUDA graph replay, median. `bytes` counts
every tensor read or written once; `fraction` is of 4.27 TB/s, the card's device-to-device copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels import quantize_sm90
from w4a4.kernels.compile_cache import compile_to
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.quantize_sm90_variant import FEW_ROWS, QuantizeVariant, Source, for_few_rows, variant_of

COPY_BYTES_PER_SECOND = 4.27e12
TOKENS = (1, 16, 256, 2048, 4096, 8192)
COLD_BYTES = 400e6
CLIP = (0.95, 3.5)


@dataclass(frozen=True)
class Case:
    model: str
    step: str
    source: Source
    channels: int
    layout: str
    hadamard: int = 1
    permuted: bool = False
    weighted: bool = False

    @property
    def linear(self) -> LinearLayout:
        k = self.channels
        segments = {
            "w4": (Segment(k, 4, 4),),
            "dual": (Segment(k - k // 8, 4, 4), Segment(k // 8, 8, 8)),
            "dual a8": (Segment(k - k // 8, 8, 4), Segment(k // 8, 8, 8)),
        }[self.layout]
        return LinearLayout(128, segments, CLIP, hadamard=self.hadamard)

    def variant(self, tokens: int) -> QuantizeVariant:
        chosen = variant_of(self.source, self.linear, self.permuted, self.weighted)
        return for_few_rows(chosen) if tokens <= FEW_ROWS else chosen

    def num_bytes(self, tokens: int) -> int:
        """Bytes read and written for one call."""
        per_channel = {"plain": 3, "rmsnorm": 3, "rmsnorm_residual": 7, "silu": 5}[self.source]
        return tokens * (per_channel * self.channels + 4 * len(self.linear.segments))


def cases() -> list[Case]:
    found = []
    for model, hidden, inner in (("llama-3-8b", 4096, 14336), ("llama-3-70b", 8192, 28672)):
        for layout in ("w4", "dual", "dual a8"):
            found += [
                Case(model, "rmsnorm + residual", "rmsnorm_residual", hidden, layout),
                Case(model, "attention output", "plain", hidden, layout),
                Case(model, "swiglu, hadamard 128", "silu", inner, layout, hadamard=128),
            ]
        found += [
            Case(model, "swiglu", "silu", inner, "dual"),
            Case(model, "rmsnorm + residual, gain, permuted", "rmsnorm_residual", hidden, "dual", 1, True, True),
        ]
    return found


def operands(case: Case, tokens: int) -> tuple[Any, ...]:
    """One set of arguments of `quantize_sm90.launch` after the variant."""
    k, layout = case.channels, case.linear

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    has_residual = case.source == "rmsnorm_residual"
    return (
        random(tokens, 2 * k if case.source == "silu" else k),
        random(tokens, k) if has_residual else None,
        random(k) if case.weighted else None,
        torch.randperm(k, device="cuda", dtype=torch.int32) if case.permuted else None,
        torch.empty(tokens, k, device="cuda", dtype=torch.bfloat16) if has_residual else None,
        torch.empty(tokens, k, device="cuda", dtype=torch.int8),
        torch.empty(tokens, len(layout.segments), device="cuda"),
        1e-5,
        layout,
    )


def median_us(calls: list[Callable[[], None]], repeats: int = 7) -> float:
    """Microseconds a call: the calls are captured in one graph, the median is over replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    graph.replay()
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def rotation(num_bytes: int) -> tuple[int, int]:
    """Sets of operands, and calls in a graph."""
    sets = max(2, min(32, int(COLD_BYTES // num_bytes) + 1))
    return sets, max(sets, min(64, int(2e9 // num_bytes)) // sets * sets)


def measure(case: Case, tokens: int) -> dict[str, Any]:
    variant = case.variant(tokens)
    num_bytes = case.num_bytes(tokens)
    sets, calls = rotation(num_bytes)
    held = [operands(case, tokens) for _ in range(sets)]

    def call(index: int) -> Callable[[], None]:
        return lambda: quantize_sm90.launch(variant, *held[index % sets])

    microseconds = median_us([call(i) for i in range(calls)])
    return {
        "model": case.model,
        "kernel": f"{case.step} ({case.layout})",
        "m": tokens,
        "k": case.channels,
        "variant": variant.name,
        "bytes": num_bytes,
        "ours_us": round(microseconds, 2),
        "gbps": round(num_bytes / microseconds / 1e3, 1),
        "fraction": round(num_bytes / (microseconds * 1e-6) / COPY_BYTES_PER_SECOND, 3),
    }


def copy_record() -> dict[str, float]:
    """The same measurement of a plain copy of 256 MB."""
    pairs = [(torch.randn(64 * 2**20, device="cuda"), torch.empty(64 * 2**20, device="cuda")) for _ in range(3)]
    microseconds = median_us([lambda p=p: p[1].copy_(p[0]) for p in pairs])
    num_bytes = 2 * 256 * 2**20
    return {"bytes": num_bytes, "us": round(microseconds, 1), "gbps": round(num_bytes / microseconds / 1e3, 1)}


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", type=Path)
    parser.add_argument("--commit", default=None, help="where the tree is no git checkout")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    if arguments.compile:
        for variant in dict.fromkeys(case.variant(tokens) for case in cases() for tokens in TOKENS):
            compile_to(quantize_sm90.kernel_of(variant), quantize_sm90.ARCH, arguments.compile)
        return
    torch.manual_seed(0)
    copy = copy_record()
    print(f"copy {copy['gbps']:.0f} GB/s")
    records = []
    for case in cases():
        for tokens in arguments.tokens:
            records.append(measure(case, tokens))
        row = " ".join(f"{r['m']}:{r['ours_us']:.1f}us/{r['fraction']:.0%}" for r in records[-len(arguments.tokens) :])
        print(f"{case.model} {case.step} [{case.layout}] {row}", flush=True)
    if arguments.out:
        result = {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "commit": arguments.commit or commit(),
            "limit_bytes_per_second": COPY_BYTES_PER_SECOND,
            "copy": copy,
            "records": records,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
