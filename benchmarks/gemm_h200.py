"""Times the W4Ax GEMM on a Hopper GPU beside cuBLAS bf16, cuBLASLt fp8 and int8: writes results/gemm-h200.json.

    python benchmarks/gemm_h200.py --out benchmarks/results/gemm-h200.json
    python benchmarks/gemm_h200.py --tune kernels/tuning_sm90.json    # chooses plans first
    python benchmarks/gemm_h200.py --compile CACHE    # fills a kernel cache; needs no GPU

One process; how it measures is `serve/bench/gemm_tuning.py`. Prefill is also timed together with the quantise kernel in
front of it (`with_quantise_us`), and with 8-bit activations throughout (layouts `...-a8`), which is how `serve` runs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels import quantize_sm90
from w4a4.kernels.compile_cache import compile_to
from w4a4.kernels.gemm_sm90 import ARCH, kernel_of, run
from w4a4.kernels.gemm_sm90_variant import Plan
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.prepack_sm90 import PrepackedLinear
from w4a4.kernels.quantize_sm90_variant import QuantizeVariant, Source, variant_of
from w4a4.kernels.tuning_sm90 import choose, parse, variants
from w4a4.serve.bench.gemm_tuning import (
    COLD_BYTES,
    SHAPES,
    Calls,
    layout_of,
    measure,
    our_calls,
    random_linears,
    table_of,
    tune,
    tuned_variants,
    write_lines,
)

LAYOUTS = ("w4", "dual", "dual-a8")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
QUANTISED_TOKENS = 4096  # and more: timed with the quantise kernel too
A8_TOKENS = 1024  # and more: where the power that 8-bit codes take shows
SOURCES: dict[str, Source] = {"qkv": "rmsnorm_residual", "o": "plain", "gate_up": "rmsnorm_residual", "down": "silu"}
CLIP = (0.95, 3.5)


def quantised_layout(layer: str, layout: LinearLayout) -> LinearLayout:
    """As the `dual` recipe quantises the layer's input: clipped, with a Hadamard in front of down_proj."""
    return replace(layout, clip=CLIP, hadamard=128 if layer == "down" else 1)


def quantise_variant(layer: str, layout: LinearLayout) -> QuantizeVariant:
    return variant_of(SOURCES[layer], quantised_layout(layer, layout), False, False)


def pair_calls(layer: str, linears: Sequence[PrepackedLinear], tokens: int, plan: Plan) -> Calls:
    """Quantise, multiply."""
    layout, variant = quantised_layout(layer, linears[0].layout), quantise_variant(layer, linears[0].layout)
    source, k = SOURCES[layer], layout.in_features

    def values(width: int) -> Tensor:
        return torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    x = values(2 * k if source == "silu" else k)
    residual, hidden = (values(k), values(k)) if source == "rmsnorm_residual" else (None, None)
    codes = torch.empty(tokens, k, dtype=torch.int8, device="cuda")
    scales = torch.empty(tokens, len(layout.segments), device="cuda")
    out = torch.empty(tokens, layout.out_features, dtype=torch.bfloat16, device="cuda")

    def call(linear: PrepackedLinear) -> None:
        quantize_sm90.launch(variant, x, residual, None, None, hidden, codes, scales, 1e-5, layout)
        run(codes, scales, linear, out, plan)

    rotation = [linears[i % len(linears)] for i in range(max(4, len(linears)))]
    return [lambda linear=linear: call(linear) for linear in rotation]


def baseline_calls(n: int, k: int, tokens: int) -> dict[str, Calls]:
    """cuBLAS bf16, cuBLASLt fp8 with row-wise scales, cuBLAS int8 without scales (more than 16 tokens: its limit)."""

    def weights(size: int, make: Callable[[], Tensor]) -> list[Tensor]:
        copies = max(2, min(16, int(COLD_BYTES // (n * k * size)) + 1))
        kept = [make() for _ in range(copies)]
        return [kept[i % copies] for i in range(max(4, copies))]

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def integers(*shape: int) -> Tensor:
        return (randn(*shape) * (127 / 3.8)).round().clamp(-127, 127).to(torch.int8)

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


def plan_for(table: dict[str, Any] | None, bits: tuple[int, ...], n: int, k: int, tokens: int) -> Plan:
    """As a table measured in this process says, else the installed one."""
    if table is None:
        return choose(bits, n, k, tokens)
    return next(plan for limit, plan in parse(table)[bits, n, k] if tokens <= limit)


def records(
    table: dict[str, Any] | None, rounds: int, models: Sequence[str], sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One record per model, layer, layout and number of tokens."""
    for model in models:
        for layer, (n, k) in SHAPES[model].items():
            linears: dict[str, list[PrepackedLinear]] = {}
            for name in ("w4", "dual"):
                linears[name] = random_linears(layout_of(name, n, k))
            a8 = layout_of("dual-a8", n, k)
            linears["dual-a8"] = [PrepackedLinear(a8, held.words, held.rows) for held in linears["dual"]]
            for tokens in sizes:
                contenders = baseline_calls(n, k, tokens)
                present = {name: group for name, group in linears.items() if tokens >= A8_TOKENS or name != "dual-a8"}
                for name, group in present.items():
                    plan = plan_for(table, group[0].weight_bits, n, k, tokens)
                    contenders[name] = our_calls(group, tokens, plan)
                    if tokens >= QUANTISED_TOKENS:
                        contenders[f"{name}, quantised"] = pair_calls(layer, group, tokens, plan)
                times = {name: round(us, 2) for name, us in measure(contenders, rounds).items()}
                for name, group in present.items():
                    record = {"model": model, "layer": layer, "layout": name, "m": tokens, "n": n, "k": k}
                    record |= {"weight_bytes": group[0].weight_bytes, "ours_us": times[name]}
                    if f"{name}, quantised" in times:
                        record["with_quantise_us"] = times[f"{name}, quantised"]
                    yield record | {f"{other}_us": times[other] for other in ("bf16", "fp8", "int8") if other in times}


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
    parser.add_argument("--models", nargs="*", default=list(SHAPES), help="only these")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="only these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="commit of the working tree, for the header")
    arguments = parser.parse_args()
    if arguments.compile:
        for variant in dict.fromkeys([*variants(), *tuned_variants()]):
            print(compile_to(kernel_of(variant), ARCH, arguments.compile).name, flush=True)
        for layers in SHAPES.values():
            for layer, (n, k) in layers.items():
                for name in LAYOUTS:
                    kernel = quantize_sm90.kernel_of(quantise_variant(layer, layout_of(name, n, k)))
                    print(compile_to(kernel, ARCH, arguments.compile).name, flush=True)
        return
    random.seed(0)
    table = None
    if arguments.tune:
        table = table_of(list(tune(max(1, arguments.rounds - 1))))
        arguments.tune.write_text(write_lines(table, "plans"))
    if arguments.out:
        found = header() | {"commit": arguments.commit, "records": []}
        for record in records(table, arguments.rounds, arguments.models, arguments.tokens):
            found["records"].append(record)
            arguments.out.write_text(write_lines(found, "records"))


if __name__ == "__main__":
    main()
