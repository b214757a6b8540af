"""`w4a4 bench kernels --tune`: which plan of the Hopper GEMM is fastest for each shape, measured.

Also what `benchmarks/gemm_h200.py` measures with: operands as a model has them, and contenders in turns. Every
contender in every round: a CUDA graph of launches that rotate through more than 300 MB of weights (cold L2), in random
order and, if long, after a pause, so that nobody always runs on the warmest chip; the median over rounds of the median
over replays. Launches of ours overlap as they do in a model (programmatic dependent launch): the next one may fetch
weights while the last one ends.

Operands are normal values as the recipes quantise them, not uniform codes: what toggles in the multipliers costs power,
and power is what bounds a large product.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels.gemm_sm90 import lanes, run
from w4a4.kernels.gemm_sm90_variant import Plan, Variant
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.prepack_sm90 import PrepackedLinear, padded_width
from w4a4.kernels.tuning_sm90 import entry

SHAPES = {
    "llama-3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "llama-3-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
LAYERS = ("qkv", "o", "gate_up", "down")
LAYOUTS = ("w4", "dual")
TUNED_TOKENS = {8: 1, 16: 16, 64: 64, 256: 256, 1024: 1024, 8192: 4096}  # limit of an entry: what it is measured with
COLD_BYTES = 300e6
PAUSE_S = 0.02
HEATING_US = 30.0
CODE_SIGMAS = {4: 7 / 2.6, 8: 127 / 3.8}  # of the codes of a normal channel: scales clip at so many sigmas
_PIECE = 1 << 27  # random values at once

Calls = Sequence[Callable[[], object]]


def layout_of(name: str, n: int, k: int) -> LinearLayout:
    """`w4`: all int4. `dual`: an eighth of the columns int8 with 8-bit activations. `...-a8`: 8-bit activations."""
    dual = (Segment(k - k // 8, 4, 4), Segment(k // 8, 8, 8))
    layout = LinearLayout(n, {"w4": (Segment(k, 4, 4),), "dual": dual}[name.removesuffix("-a8")])
    return layout.at("a8") if name.endswith("-a8") else layout


def normal_codes(bits: int, *shape: int) -> Tensor:
    """int8 codes of normal values in `bits` bits, on the GPU."""
    limit = 2 ** (bits - 1) - 1
    codes = torch.empty(shape, dtype=torch.int8, device="cuda")
    flat = codes.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        values = torch.randn(piece.shape, device="cuda") * CODE_SIGMAS[bits]
        piece.copy_(values.round_().clamp_(-limit, limit))
    return codes


def random_linears(layout: LinearLayout) -> list[PrepackedLinear]:
    """Prepacked weights of normal codes, as many as make L2 cold: one draw, moved along the rows for the others."""
    rows = layout.out_features // 64
    parts = []
    for segment in layout.segments:
        codes = normal_codes(segment.weight_bits, rows, 64 * padded_width(segment.width, segment.weight_bits))
        if segment.weight_bits == 4:
            low, high = codes.chunk(2, 1)
            codes = (low & 15) | (high << 4)
        parts.append(codes.contiguous().view(torch.int32))
    words = torch.cat(parts, 1)
    copies = max(2, min(24, int(COLD_BYTES // (words.numel() * 4)) + 1))
    scales = torch.rand(layout.out_features, 4, device="cuda")
    return [PrepackedLinear(layout, words.roll(i, 0), scales) for i in range(copies)]


def our_calls(linears: Sequence[PrepackedLinear], tokens: int, plan: Plan) -> Calls:
    layout = linears[0].layout
    codes = torch.cat([normal_codes(segment.act_bits, tokens, segment.width) for segment in layout.segments], 1)
    codes, scales = lanes(codes, torch.rand(tokens, len(layout.segments), device="cuda"), layout)
    out = torch.empty(tokens, layout.out_features, device="cuda", dtype=torch.bfloat16)
    rotation = [linears[i % len(linears)] for i in range(max(4, len(linears)))]
    return [partial(run, codes, scales, linear, out, plan) for linear in rotation]


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
    make_event: Any = torch.cuda.Event
    start, stop = make_event(enable_timing=True), make_event(enable_timing=True)

    def replay(name: str) -> float:
        start.record()
        graphs[name].replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / len(contenders[name])

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
    stages = 6 if is_dual else 5
    if tokens <= 256:
        return [
            *(Plan(Variant(bits, 128, 2, 2, stages, looks_ahead=True, cluster=c), 2) for c in (1, 2)),
            Plan(
                Variant(bits, 128, 2, 2, stages + 2 * (not is_dual), looks_ahead=True, cluster=2, shares_tiles=True),
                2,
                "all",
            ),
            Plan(Variant(bits, 64, 2, 2, 8 if is_dual else 6, looks_ahead=True), 4),
            Plan(Variant(bits, 256, 2, 2, 4, **large), 1),
        ]
    if tokens <= 1024:
        return [
            Plan(Variant(bits, 256, 2, 2, 4, cluster=2, **large), 8),
            Plan(Variant(bits, 256, 2, 2, 4, **large), 4),
            *(Plan(Variant(bits, 128, 2, 2, stages, looks_ahead=True, cluster=c), 8) for c in (1, 2)),
        ]
    return [Plan(Variant(bits, 256, 2, 2, 4, cluster=c, **large), g) for c, g in ((2, 8), (2, 2), (1, 2), (2, 16))]


def tuned_variants() -> Iterator[Variant]:
    """Every kernel that `tune` times."""
    for bits in ((4,), (4, 8)):
        for tokens in TUNED_TOKENS.values():
            yield from (plan.variant for plan in candidates(bits, tokens))


def tune(rounds: int, layers: Sequence[str] = LAYERS) -> Iterator[dict[str, Any]]:
    """The lines of `tuning_sm90.json` for some layers of all models, as they are measured."""
    for shapes in SHAPES.values():
        for n, k in (shapes[layer] for layer in layers):
            for name in LAYOUTS:
                linears = random_linears(layout_of(name, n, k))
                bits = linears[0].weight_bits
                for limit, tokens in TUNED_TOKENS.items():
                    options = candidates(bits, tokens)
                    calls = {str(i): our_calls(linears, tokens, plan) for i, plan in enumerate(options)}
                    times = measure(calls, rounds)
                    best = min(times, key=lambda key: times[key])
                    yield entry(bits, n, k, limit, options[int(best)], times[best])


def merge(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of a table with those measured again in the place of the old ones, and others behind."""

    def key(line: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(line["weight_bits"]), line["rows"], line["columns"], line["tokens"]

    found = {key(line): line for line in old}
    found.update({key(line): line for line in new})
    return list(found.values())


def table_of(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `tuning_sm90.parse` reads."""
    return {"gpu": torch.cuda.get_device_name(), "plans": list(plans)}


def write_lines(table: dict[str, Any], *keys: str) -> str:
    """JSON with one record per line, so that a change shows as the lines it changes; `keys` hold the records."""
    text = json.dumps({k: v for k, v in table.items() if k not in keys})[:-1]
    for key in keys:
        text += f', "{key}": [\n' + ",\n".join(json.dumps(line) for line in table[key]) + "\n]"
    return text + "}\n"
