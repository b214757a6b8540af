"""Plots of a benchmark as PNG and SVG, each with its numbers as JSON beside it. Marker and line tell series apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from w4a4.serve.bench.kernels import KernelRecord
from w4a4.serve.bench.records import Record
from w4a4.serve.bench.roofline import Limits

# colours of Okabe and Ito, which differ in lightness as well
_STYLES = (("#000000", "o", "-"), ("#D55E00", "s", "--"), ("#0072B2", "^", "-."), ("#009E73", "D", ":"))
_FILLS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#BBBBBB")


def write_plots(folder: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> list[Path]:
    """Every plot for which there are numbers; returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    plots: tuple[tuple[str, Any, Callable[[Any, Any], None]], ...] = (
        ("decode-batch", _decode_numbers(records), _draw_decode),
        ("memory", facts.get("memory_gib"), _draw_memory),
        ("step-time", facts.get("breakdown"), _draw_steps),
    )
    for name, numbers, draw in plots:
        if numbers:
            written += _save(folder, name, numbers, partial(_swapped, draw, numbers))
    return written


def write_roofline(folder: Path, records: Sequence[KernelRecord], limits: Limits | None) -> list[Path]:
    """Operations per second against operations per byte of every matrix product, below the limits if they are known."""
    folder.mkdir(parents=True, exist_ok=True)
    products = [record for record in records if record.operations]
    numbers = [
        {
            "model": record.model,
            "op": record.op,
            "m": record.tokens,
            "ops_per_byte": record.operations / record.bytes,
            "tops": record.operations / record.microseconds / 1e6,
            "bf16_tops": record.operations / record.base_us / 1e6 if record.base_us else None,
        }
        for record in products
    ]
    return _save(folder, "roofline", numbers, lambda axes: _draw_roofline(axes, numbers, limits)) if numbers else []


def _draw_roofline(axes: Any, numbers: Sequence[Mapping[str, Any]], limits: Limits | None) -> None:
    import numpy as np

    for key, (colour, marker, _), label in (("tops", _STYLES[0], "w4a4"), ("bf16_tops", _STYLES[1], "16 bit")):
        points = [(entry["ops_per_byte"], entry[key]) for entry in numbers if entry[key]]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=22, marker=marker, edgecolors=colour, facecolors="none", label=label)
    if limits is not None:
        intensity = np.geomspace(0.5, 2e4, 200)
        for rate, (colour, _, line), label in (
            (limits.int8, _STYLES[0], "limit, int8"),
            (limits.bf16, _STYLES[1], "limit, bf16"),
        ):
            top = np.minimum(intensity * limits.bandwidth, rate) / 1e12
            axes.plot(intensity, top, line, color=colour, linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that our kernel moves")
    axes.set_ylabel("TOPS")
    axes.legend(frameon=False, fontsize=8)


def _swapped(draw: Callable[[Any, Any], None], numbers: Any, axes: Any) -> None:
    draw(axes, numbers)


def _save(folder: Path, name: str, numbers: Any, draw: Callable[[Any], None]) -> list[Path]:
    """Draw one figure and write it as PNG and SVG, and its numbers as JSON."""
    figure = _figure()
    draw(figure.axes[0])
    written = []
    for ending in ("png", "svg"):
        written.append(folder / f"{name}.{ending}")
        figure.savefig(written[-1], dpi=160)
    written.append(folder / f"{name}.json")
    written[-1].write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf8")
    return written


def _figure() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(True, linewidth=0.4, alpha=0.6)
    return figure


def _decode_numbers(records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Series -> (batch, tokens/s) of the decode tests."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if record.test.startswith("tg"):
            name = f"{record.recipe}, activations {record.act}, KV {record.kv}"
            series.setdefault(name, []).append((record.batch, record.tok_s))
    return {name: sorted(points) for name, points in series.items()}


def _draw_decode(axes: Any, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for (name, points), (colour, marker, line) in zip(series.items(), _STYLES * 3, strict=False):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker=marker, linestyle=line, color=colour, label=name, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch")
    axes.set_ylabel("decode, tokens/s")
    axes.legend(frameon=False, fontsize=8)


def _draw_memory(axes: Any, splits: Mapping[str, Mapping[str, float]]) -> None:
    _stacked(axes, {name: dict(split) for name, split in splits.items()}, "GiB")


def _draw_steps(axes: Any, breakdowns: Sequence[Mapping[str, Any]]) -> None:
    bars = {
        f"{part['candidate']}\nbatch {part['batch']}": {**part["parts_us"], "gap": max(part["gap_us"], 0.0)}
        for part in breakdowns
    }
    _stacked(axes, bars, "µs per decode step")


def _stacked(axes: Any, bars: Mapping[str, Mapping[str, float]], unit: str) -> None:
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    bottoms = dict.fromkeys(bars, 0.0)
    for part, fill in zip(parts, _FILLS * 2, strict=False):
        heights = [bar.get(part, 0.0) for bar in bars.values()]
        axes.bar(list(bars), heights, bottom=list(bottoms.values()), color=fill, label=part, width=0.6)
        bottoms = {name: bottoms[name] + height for name, height in zip(bars, heights, strict=True)}
    axes.set_ylabel(unit)
    axes.legend(frameon=False, fontsize=8)
