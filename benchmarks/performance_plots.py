"""Plots of `docs/performance.md` as SVG, from the same JSON as its tables.

Markers and line styles tell series apart, not colour alone; the same results give the same bytes with one version of
matplotlib.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from performance_tables import Entry, Limits, load_bench, load_gemm, load_kv4

# series -> (colour, marker, line); colours are Okabe and Ito's, which differ in lightness as well
STYLE = {
    "ours": ("#000000", "o", "-"),
    "bf16": ("#D55E00", "s", "--"),
    "fp8": ("#0072B2", "^", "-."),
    "int8": ("#009E73", "D", ":"),
    "w4a16": ("#CC79A7", "v", "--"),
}
OTHER = ("#666666", "x", ":")
FILLS = (("#000000", ""), ("#D55E00", "//"), ("#0072B2", "\\\\"), ("#009E73", "xx"), ("#E69F00", ".."), ("#CCCCCC", ""),
         ("#56B4E9", "++"), ("#CC79A7", "oo"))  # fmt: skip


def plots(results: Path) -> dict[str, bytes]:
    """Every plot that the results allow: file name -> SVG."""
    drawn: dict[str, bytes] = {}
    found = load_gemm(results)
    if found is not None:
        for layout in sorted({record["layout"] for record in found.records}):
            records = [record for record in found.records if record["layout"] == layout]
            drawn[f"roofline-{layout}.svg"] = _svg(_roofline(records, layout, found.limits))
            drawn[f"gemm-{layout}.svg"] = _svg(_gemm_speed(records, layout))
    found = load_kv4(results)
    if found is not None:
        drawn["kv4-context.svg"] = _svg(_kv4_context(found.records, found.limits))
    found = load_bench(results)
    if found is not None and any(record["test"].startswith("tg") for record in found.records):
        drawn["decode-batch.svg"] = _svg(_decode_batch(found.records))
    if found is not None and found.header.get("breakdown"):
        drawn["step-time.svg"] = _svg(_step_time(found.header["breakdown"]))
    if found is not None and found.header.get("memory_split_gib"):
        drawn["memory.svg"] = _svg(_memory(found.header["memory_split_gib"]))
    return drawn


def gemm_bytes(record: Entry, series: str) -> float:
    """Bytes one GEMM must move: weights as stored, activations as read, bf16 outputs."""
    m, n, k = record["m"], record["n"], record["k"]
    width = 2 if series == "bf16" else 1
    weights = record["weight_bytes"] if series == "ours" else width * n * k
    return float(weights + width * m * k + 2 * m * n)


def _roofline(records: list[Entry], layout: str, limits: Limits | None) -> Any:
    import numpy as np

    figure, ax = _axes()
    for series in ("ours", "bf16", "fp8", "int8"):
        chosen = [record for record in records if record.get(f"{series}_us")]
        if not chosen:
            continue
        operations = np.array([2.0 * r["m"] * r["n"] * r["k"] for r in chosen])
        intensity = operations / np.array([gemm_bytes(r, series) for r in chosen])
        rate = operations / np.array([r[f"{series}_us"] for r in chosen]) / 1e6
        colour, marker, _ = STYLE[series]
        face = colour if series == "ours" else "none"
        ax.scatter(intensity, rate, s=22, marker=marker, edgecolors=colour, facecolors=face, label=series, linewidths=1)
    if limits is not None:
        x = np.geomspace(0.5, 2e4, 200)
        ax.plot(x, np.minimum(x * limits.bandwidth, limits.int8) / 1e12, color="#000", linewidth=1, label="limit, int8")
        ax.plot(
            x,
            np.minimum(x * limits.bandwidth, limits.bf16) / 1e12,
            "--",
            color="#D55E00",
            linewidth=1,
            label="limit, bf16",
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("operations per byte moved")
    ax.set_ylabel("TOPS or TFLOPS")
    ax.set_title(f"GEMM roofline, layout {layout}", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    return figure


def _gemm_speed(records: list[Entry], layout: str) -> Any:
    """Throughput of one decoder layer's four GEMMs against M, a panel per model."""
    models = sorted({record["model"] for record in records})
    figure, axes = _panels(len(models))
    for ax, model in zip(axes, models, strict=True):
        for series in ("ours", "bf16", "fp8", "int8"):
            points = []
            for m in sorted({record["m"] for record in records}):
                chosen = [r for r in records if r["model"] == model and r["m"] == m]
                if chosen and all(record.get(f"{series}_us") for record in chosen):
                    operations = sum(2 * r["m"] * r["n"] * r["k"] for r in chosen)
                    points.append((m, operations / sum(r[f"{series}_us"] for r in chosen) / 1e6))
            _line(ax, points, series)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("M (tokens)")
        ax.set_title(f"{model}, layout {layout}", fontsize=10)
    axes[0].set_ylabel("TOPS or TFLOPS, one layer")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _kv4_context(records: list[Entry], limits: Limits | None) -> Any:
    cases = sorted({(r["heads_q"], r["heads_kv"], r["head_dim"], r["batch"]) for r in records})
    figure, axes = _panels(len(cases))
    for ax, case in zip(axes, cases, strict=True):
        chosen = sorted(
            (r for r in records if (r["heads_q"], r["heads_kv"], r["head_dim"], r["batch"]) == case),
            key=lambda r: r["context"],
        )
        ax.plot(
            [r["context"] for r in chosen],
            [r["base16_us"] for r in chosen],
            "s--",
            color="#D55E00",
            label="16 bit",
            markersize=4,
        )
        ax.plot(
            [r["context"] for r in chosen],
            [r["ours_us"] for r in chosen],
            "o-",
            color="#000",
            label="KV4",
            markersize=4,
        )
        if limits is not None:
            floor = [r["bytes"] / limits.bandwidth * 1e6 for r in chosen]
            ax.plot([r["context"] for r in chosen], floor, ":", color="#0072B2", label="bytes / copy bandwidth")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("context, tokens")
        ax.set_title(f"{case[0]} q, {case[1]} kv x {case[2]}, batch {case[3]}", fontsize=9)
    axes[0].set_ylabel("decode attention, µs")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _decode_batch(records: list[Entry]) -> Any:
    chosen = [record for record in records if record["test"].startswith("tg")]
    models = sorted({record["model"] for record in chosen})
    figure, axes = _panels(len(models))
    for ax, model in zip(axes, models, strict=True):
        rows = sorted((r for r in chosen if r["model"] == model), key=lambda r: r["batch"])
        for act in sorted({record["act"] for record in rows}):
            own = [(r["batch"], r["tok_s"]) for r in rows if r["act"] == act]
            _line(ax, own, "ours", label=f"w4a4, activations {act}")
        for name in sorted({name for record in rows for name in record.get("baselines") or {}}):
            points = {r["batch"]: r["baselines"][name] for r in rows if (r.get("baselines") or {}).get(name)}
            _line(ax, sorted(points.items()), name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("batch")
        ax.set_title(model, fontsize=10)
    axes[0].set_ylabel("decode, tokens/s")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _step_time(breakdowns: list[Entry]) -> Any:
    """A panel per model. Kernels overlap, so each has its share of their summed times, of the step."""
    models = list(dict.fromkeys(entry["model"] for entry in breakdowns))
    figure, axes = _panels(len(models))
    parts = list(dict.fromkeys(part for entry in breakdowns for part in entry["parts_us"]))
    for ax, model in zip(axes, models, strict=True):
        bars = {}
        for entry in breakdowns:
            if entry["model"] == model:
                scale = entry["step_us"] / sum(entry["parts_us"].values()) / 1e3
                bars[f"{entry['batch']}"] = {part: us * scale for part, us in entry["parts_us"].items()}
        _stack(ax, bars, parts)
        ax.set_xlabel("batch")
        ax.set_title(model, fontsize=10)
    axes[0].set_ylabel("decode step, ms")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _memory(splits: dict[str, dict[str, float]]) -> Any:
    figure, ax = _axes()
    _stack(ax, splits, list(dict.fromkeys(part for split in splits.values() for part in split)))
    ax.set_ylabel("GiB")
    ax.tick_params(axis="x", labelsize=8)
    ax.legend(frameon=False, fontsize=8)
    return figure


def _stack(ax: Any, bars: dict[str, dict[str, float]], parts: list[str]) -> None:
    bottoms = dict.fromkeys(bars, 0.0)
    for part, (fill, hatch) in zip(parts, FILLS, strict=False):
        heights = [bar.get(part, 0.0) for bar in bars.values()]
        ax.bar(
            list(bars), heights, bottom=list(bottoms.values()), color=fill, hatch=hatch, edgecolor="#333333",
            linewidth=0.4, label=part, width=0.6,
        )  # fmt: skip
        bottoms = {name: bottoms[name] + height for name, height in zip(bars, heights, strict=True)}


def _line(ax: Any, points: list[tuple[float, float]], series: str, label: str = "") -> None:
    if points:
        colour, marker, line = STYLE.get(series, OTHER)
        x, y = zip(*points, strict=True)
        ax.plot(x, y, marker=marker, linestyle=line, color=colour, label=label or series, markersize=5)


def _axes() -> tuple[Any, Any]:
    figure, axes = _panels(1)
    return figure, axes[0]


def _panels(count: int) -> tuple[Any, Any]:
    """A figure of `count` panels, three to a row, with a light grid."""
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = -(-count // 3)
    figure = Figure(figsize=(max(6.4, 3.6 * columns), 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(True, which="major", linewidth=0.4, alpha=0.6)
    for ax in axes[count:]:
        ax.set_visible(False)
    return figure, axes[:count]


def _svg(figure: Any) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "w4a4", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
