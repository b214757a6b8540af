"""Times the W4Ax GEMM on a Hopper GPU beside cuBLAS bf16, cuBLASLt fp8 and int8: writes results/gemm-h200.json.

    python benchmarks/gemm_h200.py --out benchmarks/results/gemm-h200.json
    python benchmarks/gemm_h200.py --tune kernels/tuning_sm90.json    # chooses plans first
    python benchmarks/gemm_h200.py --compile CACHE    # fills a kernel cache; needs no GPU

One process. Every contender in every round: a CUDA graph of launches that rotate through more than 300 MB of weights
(cold L2), random data, in random order and, if long, after a pause, so that nobody
always runs on the warmest chip; the median over
rounds of the median over replays. Launches of ours overlap as they do in a model (programmatic dependent launch): the
next one may fetch weights while the last one ends.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels.compile_cache import compile_to
from w4a4.kernels.gemm_sm90 import ARCH, kernel_of, run
from w4a4.kernels.gemm_sm90_variant import Plan, Variant
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.prepack_sm90 import PrepackedLinear, padded_width
from w4a4.kernels.tuning_sm90 import choose, entry, parse, variants

SHAPES = {
    "llama-3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "llama-3-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
LAYOUTS = ("w4", "dual")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
TUNED_TOKENS = {8: 1, 16: 16, 64: 64, 256: 256, 1024: 1024, 8192: 4096}  # limit of an entry: what it is measured with
COLD_BYTES = 300e6
PAUSE_S = 0.02
HEATING_US = 30.0

Calls = Sequence[Callable[[], object]]


def layout_of(name: str, n: int, k: int) -> LinearLayout:
    """`w4`: all int4. `dual`: an eighth of the columns int8 with 8-bit activations."""
    dual = (Segment(k - k // 8, 4, 4), Segment(k // 8, 8, 8))
    return LinearLayout(n, {"w4": (Segment(k, 4, 4),), "dual": dual}[name])


def random_linears(layout: LinearLayout) -> list[PrepackedLinear]:
    """Random prepacked weights, as many as make L2 cold."""
    n = layout.out_features
    words = sum(padded_width(s.width, s.weight_bits) * 2 * s.weight_bits for s in layout.segments)
    copies = max(2, min(24, int(COLD_BYTES // (n // 16 * words)) + 1))
    return [
        PrepackedLinear(
            layout,
            torch.randint(-(2**31), 2**31 - 1, (n // 64, words), dtype=torch.int32, device="cuda"),
            torch.rand(n, 4, device="cuda"),
        )
        for _ in range(copies)
    ]


def our_calls(linears: Sequence[PrepackedLinear], tokens: int, plan: Plan) -> Calls:
    layout = linears[0].layout
    codes = torch.randint(-128, 128, (tokens, layout.in_features), device="cuda", dtype=torch.int8)
    scales = torch.rand(tokens, len(layout.segments), device="cuda")
    out = torch.empty(tokens, layout.out_features, device="cuda", dtype=torch.bfloat16)
    rotation = [linears[i % len(linears)] for i in range(max(4, len(linears)))]
    return [lambda linear=linear: run(codes, scales, linear, out, plan) for linear in rotation]


def baseline_calls(n: int, k: int, tokens: int) -> dict[str, Calls]:
    """cuBLAS bf16, cuBLASLt fp8 with row-wise scales, cuBLAS int8 without scales (more than 16 tokens: its limit)."""

    def weights(size: int, make: Callable[[], Tensor]) -> list[Tensor]:
        copies = max(2, min(16, int(COLD_BYTES // (n * k * size)) + 1))
        kept = [make() for _ in range(copies)]
        return [kept[i % copies] for i in range(max(4, copies))]

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)

    x, out = randn(tokens, k), torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)
    x8, scale_x, scale_w = (
        x.to(torch.float8_e4m3fn),
        torch.rand(tokens, 1, device="cuda"),
        torch.rand(1, n, device="cuda"),
    )

    def fp8(w: Tensor) -> Tensor:
        return torch._scaled_mm(
            x8, w.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    calls: dict[str, Calls] = {
        "bf16": [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights(2, lambda: randn(n, k))],
        "fp8": [lambda w=w: fp8(w) for w in weights(1, lambda: randn(n, k).to(torch.float8_e4m3fn))],
    }
    if tokens > 16:
        xi = integers(tokens, k)
        calls["int8"] = [lambda w=w: torch._int_mm(xi, w.t()) for w in weights(1, lambda: integers(n, k))]
    return calls


def measure(contenders: dict[str, Calls], rounds: int, budget_s: float = 0.01) -> dict[str, float]:
    """Microseconds of one call of each contender; see the module docstring.

    Only contenders that keep the tensor cores busy heat the chip enough for the pause to matter.
    """
    graphs = {}
    for name, calls in contenders.items():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(name: str) -> float:
        start.record()
        graphs[name].replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / len(contenders[name])

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            first = replay(name)
            if first > HEATING_US:
                time.sleep(PAUSE_S)
            repeats = max(3, min(20, int(budget_s * 1e6 / (first * len(contenders[name])))))
            times[name].append(statistics.median(replay(name) for _ in range(repeats)))
    return {name: statistics.median(values) for name, values in times.items()}


def candidates(bits: tuple[int, ...], tokens: int) -> list[Plan]:
    """Plans worth timing: what won or came close on some shape when more were tried."""
    is_dual = len(bits) == 2
    shared: dict[str, Any] = {"weights_once": True, "shares_tiles": True, "looks_ahead": True, "int4_blocks": 2}
    if tokens <= 16:
        size = 8 if tokens <= 8 else 16
        return [
            Plan(Variant(bits, size, 2, 2, 5, l2_steps=0, **shared), share="all"),
            Plan(Variant(bits, size, 2, 2, 5, l2_steps=4, **shared), share="all"),
            Plan(Variant(bits, size, 2, 2, 9, l2_steps=4, **shared), share="all"),
            Plan(Variant(bits, size, 2, 2, 5, l2_steps=4, **{**shared, "looks_ahead": False}), share="all"),
        ]
    if tokens <= 64:
        return [
            Plan(Variant(bits, size, 2, 2, stages, cluster=cluster, l2_steps=ahead, **shared), group, "all")
            for ahead in (0, 4)
            for size, stages, cluster, group in ((64, 6, 1, 1), (64, 6, 2, 1), (32, 8, 1, 2))
        ]
    large = {"packs_first": True} if is_dual else {"store_buffers": 2}
    if tokens <= 256:
        return [
            *(Plan(Variant(bits, 128, 2, 2, 5, looks_ahead=True, cluster=c), 2) for c in (1, 2)),
            Plan(Variant(bits, 128, 2, 2, 5, looks_ahead=True, cluster=2, shares_tiles=True), 2, "all"),
            Plan(Variant(bits, 64, 2, 2, 5 if is_dual else 6, looks_ahead=True), 4),
            Plan(Variant(bits, 96, 2, 2, 5, looks_ahead=True), 3),
            Plan(Variant(bits, 256, 2, 2, 4, **large), 1),
        ]
    if tokens <= 1024:
        return [
            Plan(Variant(bits, 256, 2, 2, 4, cluster=2, **large), 8),
            Plan(Variant(bits, 256, 2, 2, 4, **large), 4),
            *(Plan(Variant(bits, 128, 2, 2, 5, looks_ahead=True, cluster=c), 8) for c in (1, 2)),
            Plan(Variant(bits, 192, 2, 2, 4, store_buffers=2 if is_dual else 3, packs_first=is_dual), 8),
            Plan(Variant(bits, 160, 2, 2, 4 if is_dual else 5, store_buffers=2, packs_first=is_dual), 8),
        ]
    return [Plan(Variant(bits, 256, 2, 2, 4, cluster=c, **large), g) for c, g in ((2, 8), (2, 2), (1, 2), (2, 16))]


def tune(rounds: int) -> dict[str, Any]:
    """The table of `tuning_sm90.json`."""
    plans = []
    for layers in SHAPES.values():
        for n, k in layers.values():
            for name in LAYOUTS:
                linears = random_linears(layout_of(name, n, k))
                bits = linears[0].weight_bits
                for limit, tokens in TUNED_TOKENS.items():
                    options = candidates(bits, tokens)
                    calls = {str(i): our_calls(linears, tokens, plan) for i, plan in enumerate(options)}
                    times = measure(calls, rounds)
                    best = min(times, key=lambda key: times[key])
                    plans.append(entry(bits, n, k, limit, options[int(best)], times[best]))
    return {"gpu": torch.cuda.get_device_name(), "plans": plans}


def records(table: dict[str, Any] | None, rounds: int) -> Iterator[dict[str, Any]]:
    """One record per model, layer, layout and number of tokens."""
    plans = parse(table) if table else None
    for model, layers in SHAPES.items():
        for layer, (n, k) in layers.items():
            linears = {name: random_linears(layout_of(name, n, k)) for name in LAYOUTS}
            for tokens in TOKENS:
                contenders = baseline_calls(n, k, tokens)
                for name, group in linears.items():
                    bits = group[0].weight_bits
                    plan = choose(bits, n, k, tokens)
                    if plans:
                        plan = next(p for limit, p in plans[bits, n, k] if tokens <= limit)
                    contenders[name] = our_calls(group, tokens, plan)
                times = measure(contenders, rounds)
                for name, group in linears.items():
                    record = {"model": model, "layer": layer, "layout": name, "m": tokens, "n": n, "k": k}
                    record |= {"weight_bytes": group[0].weight_bytes, "ours_us": round(times[name], 2)}
                    yield record | {f"{other}_us": round(us, 2) for other, us in times.items() if other not in LAYOUTS}


def header() -> dict[str, Any]:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--tune", type=Path, help="choose plans first and write the table here")
    parser.add_argument("--compile", type=Path, help="only compile everything into this cache folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="commit of the working tree, for the header")
    arguments = parser.parse_args()
    if arguments.compile:
        wanted = variants()
        for bits in ((4,), (4, 8)):
            for tokens in TUNED_TOKENS.values():
                wanted += [plan.variant for plan in candidates(bits, tokens)]
        for variant in dict.fromkeys(wanted):
            print(compile_to(kernel_of(variant), ARCH, arguments.compile).name, flush=True)
        return
    random.seed(0)
    table = None
    if arguments.tune:
        table = tune(max(1, arguments.rounds - 1))
        arguments.tune.write_text(write_lines(table, "plans"))
    if arguments.out:
        found = header() | {"commit": arguments.commit, "records": []}
        for record in records(table, arguments.rounds):
            found["records"].append(record)
            arguments.out.write_text(write_lines(found, "records"))


def write_lines(table: dict[str, Any], key: str) -> str:
    """JSON with one record per line, so that a change shows as the lines it changes."""
    head = json.dumps({k: v for k, v in table.items() if k != key})[:-1]
    return head + f', "{key}": [\n' + ",\n".join(json.dumps(line) for line in table[key]) + "\n]}\n"


if __name__ == "__main__":
    main()
