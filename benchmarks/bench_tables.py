"""Tables of the whole model on a GPU beside those of speed: engine, ablation, perplexity, other programs.

All from `bench-h200.json`; keys are in README.md. A table whose key is absent stays empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_tables import table
from performance_tables import Entry, load_bench


def engine(results: Path) -> str:
    """Steady decoding through the engine beside the step alone, and all requests from first to last."""
    found = _header(results).get("engine")
    if not found:
        return ""
    rows = [
        [
            f"{entry['batch']:,}",
            entry.get("sampling", "greedy"),
            f"{entry['step_ms']:.2f}",
            f"{entry['graph_step_ms']:.2f}" if entry.get("graph_step_ms") else "",
            f"{entry['kernel_sum_ms']:.2f}" if "kernel_sum_ms" in entry else "",
            f"{entry['kernel_busy_ms']:.2f}" if "kernel_busy_ms" in entry else "",
            f"{100 * entry['idle']:.1f} %" if "idle" in entry else "",
        ]
        for entry in found["steady"]
    ]
    headers = [
        "batch",
        "sampling",
        "step, ms",
        "captured step alone, ms",
        "sum of its kernels, ms",
        "kernels at work, ms",
    ]
    headers += ["idle"]
    text = table(headers, rows, text_columns=2)
    whole = found.get("requests")
    if whole:
        text += (
            f"\n\n{whole['requests']} requests of {whole['prompt']:,} tokens in and {whole['output']} out, at once: "
            f"{whole['tok_s']:,.0f} output tokens/s ({whole['seconds']:.2f} s, {whole['steps']} steps)."
        )
    return text


def ablation(results: Path) -> str:
    """What a decode step would save without each kernel."""
    found = _header(results).get("ablation")
    if not found:
        return ""
    parts = list(dict.fromkeys(name for entry in found for name in entry["saved_us"]))
    rows = [
        [
            entry["model"],
            f"{entry['batch']:,}",
            f"{entry['step_us']:,.0f}",
            *(f"{entry['saved_us'][name]:,.0f}" if name in entry["saved_us"] else "" for name in parts),
        ]
        for entry in found
    ]
    return table(["model", "batch", "step, µs", *parts], rows)


def perplexity(results: Path) -> str:
    """GPU kernels against the CPU reference on the same checkpoint and tokens."""
    found = _header(results).get("perplexity")
    if not found:
        return ""
    rows = [
        [
            entry["model"],
            entry["act"],
            entry["path"],
            f"{entry['tokens']:,}",
            f"{entry['reference']:.3f}",
            f"{entry['gpu']:.3f}",
            f"{entry['loss_difference']:+.4f} ± {entry['loss_difference_stderr']:.4f}",
            f"{100 * entry['agreement']:.1f} %",
            f"{100 * entry['agreement_clear']:.2f} %",
        ]
        for entry in found
    ]
    headers = ["model", "activations", "through", "tokens", "reference", "GPU", "difference of the loss, nats"]
    return table([*headers, "same top token", "where the reference is clear"], rows, text_columns=3)


def others(results: Path) -> str:
    """Our decode and prefill beside other programs', measured elsewhere."""
    found = load_bench(results)
    entries = found.header.get("others", []) if found is not None else []
    if found is None or not entries:
        return ""
    names = list(dict.fromkeys(name for entry in entries for name in entry["tok_s"]))
    rows = []
    for entry in entries:
        ours = _matching(found.records, entry)
        best = max(entry["tok_s"].values())
        rows.append(
            [
                entry["model"],
                entry["what"],
                *(f"{entry['tok_s'][name]:,}" if name in entry["tok_s"] else "" for name in names),
                *_baseline_cells(found.records, entry),
                "" if ours is None else _number(ours["tok_s"]),
                "" if ours is None else f"{ours['tok_s'] / best:.2f}x",
            ]
        )
    headers = ["model", "", *(f"vLLM {name}" for name in names), "our bf16", "our fp8", "w4a4", "over the best of vLLM"]
    return table(headers, rows, text_columns=2)


def _baseline_cells(records: list[Entry], entry: Entry) -> list[str]:
    """Baselines run as loops over a fixed batch only."""
    cells = []
    loop = entry | {"test": entry["test"].removesuffix(" engine")}
    for act in ("16", "fp8"):
        found = _matching(records, loop, act)
        cells.append("" if found is None else _number(found["tok_s"]))
    return cells


def _matching(records: list[Entry], entry: Entry, act: str = "a8") -> Entry | None:
    """The record of the same model, test and batch."""
    key = (entry["model"], entry["test"], entry["batch"], act)
    return next((r for r in records if (_model(r), r["test"], r["batch"], r["act"]) == key), None)


def _model(record: Entry) -> str:
    return str(record["model"]).split(" (")[0]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _header(results: Path) -> dict[str, Any]:
    found = load_bench(results)
    return {} if found is None else found.header
