"""Tables of `docs/performance.md` from the JSON that the benchmarks write on a GPU (schema: README.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_tables import table

Entry = dict[str, Any]
BASELINES = {"bf16_us": "bf16", "fp8_us": "fp8", "int8_us": "int8"}
LAYER_ORDER = ("qkv", "o", "gate_up", "gate|up", "down")
KV_SIDES = 2

# (layers, kv-heads, head_dim) of the models for which the cache is sized
KV_MODELS = {"Llama-3-8B": (32, 8, 128), "Llama-3-70B": (80, 8, 128)}


@dataclass(frozen=True)
class Limits:
    """What a GPU can do: measured copy bandwidth in bytes/s (read and written), int8 and bf16 peak in operations/s."""

    bandwidth: float
    int8: float
    bf16: float


# H200: copy bandwidth measured (device to device, bytes read + written); dense peaks from the data sheet.
LIMITS = {"H200": Limits(4.27e12, 1979e12, 989.5e12)}


@dataclass(frozen=True)
class Results:
    """One results file: what it ran on, and its records."""

    name: str
    header: Entry
    records: list[Entry]

    @property
    def limits(self) -> Limits | None:
        return next((limits for name, limits in LIMITS.items() if name in self.header.get("gpu", "")), None)

    @property
    def provenance(self) -> str:
        """GPU, driver, versions and commit in one sentence."""
        header = self.header
        versions = header.get("versions", {})
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts = [str(header.get("gpu") or header.get("device") or "unknown device")]
        if header.get("driver"):
            parts.append(f"driver {header['driver']}")
        parts += [listed] if listed else []
        parts += [f"commit {str(header['commit'])[:12]}"] if header.get("commit") else []
        return f"Measured on {'; '.join(parts)}."


def load(results: Path, name: str, needed: Iterable[str]) -> Results | None:
    """One file, or None if there is none. Raises ValueError naming the keys that a record lacks."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    records = document.pop("records")
    for index, record in enumerate(records):
        missing = sorted(set(needed) - record.keys())
        if missing:
            raise ValueError(f"{path.name}: record {index} lacks {', '.join(missing)}")
    return Results(name, document, records) if records else None


def load_gemm(results: Path) -> Results | None:
    return load(results, "gemm-h200", ("model", "layer", "layout", "m", "n", "k", "weight_bytes", "ours_us", "bf16_us"))


def load_quantize(results: Path) -> Results | None:
    return load(results, "quantize-h200", ("kernel", "m", "k", "bytes", "ours_us"))


def load_kv4(results: Path) -> Results | None:
    needed = ("heads_q", "heads_kv", "head_dim", "batch", "context", "ours_us", "base16_us", "base16_name", "bytes")
    return load(results, "kv4-h200", needed)


def load_bench(results: Path, name: str = "bench-h200") -> Results | None:
    return load(results, name, ("model", "recipe", "act", "kv", "test", "batch", "tok_s"))


def gemm(results: Path) -> str:
    """Speed-up by regime, then one table per model and layout: layers down, M across."""
    found = load_gemm(results)
    if found is None:
        return ""
    parts = [found.provenance, _gemm_summary(found)]
    parts += [_gemm_later(found)] if found.header.get("later") else []
    for model, layout in _distinct((record["model"], record["layout"]) for record in found.records):
        chosen = [r for r in found.records if (r["model"], r["layout"]) == (model, layout)]
        parts.append(f"### {model}, layout `{layout}`\n\n{_gemm_shapes(chosen)}")
    decode = _gemm_bandwidth(found)
    if decode:
        parts.append(decode)
    return "\n\n".join(parts)


def quantize(results: Path) -> str:
    found = load_quantize(results)
    if found is None:
        return ""
    limits = found.limits
    headers = ["kernel", "tokens", "channels", "time, µs", "TB/s", *(["of copy bandwidth"] if limits else [])]
    rows = []
    for record in sorted(found.records, key=lambda r: (r["kernel"], r["k"], r["m"])):
        rate = record["bytes"] / record["ours_us"] * 1e6
        row = [
            record["kernel"],
            f"{record['m']:,}",
            f"{record['k']:,}",
            f"{record['ours_us']:,.1f}",
            f"{rate / 1e12:.2f}",
        ]
        rows.append(row + ([f"{100 * rate / limits.bandwidth:.0f} %"] if limits else []))
    return f"{found.provenance}\n\n{table(headers, rows)}"


def kv4(results: Path) -> str:
    found = load_kv4(results)
    if found is None:
        return ""
    limits = found.limits
    headers = ["heads (q/kv x dim)", "batch", "context", "KV4, µs", "16 bit, µs", "16-bit kernel", "speed-up"]
    headers += ["of copy bandwidth"] if limits else []
    rows = []
    for record in sorted(found.records, key=lambda r: (r["heads_q"], r["head_dim"], r["batch"], r["context"])):
        row = [
            f"{record['heads_q']}/{record['heads_kv']} x {record['head_dim']}",
            f"{record['batch']:,}",
            f"{record['context']:,}",
            f"{record['ours_us']:,.1f}",
            f"{record['base16_us']:,.1f}",
            str(record["base16_name"]),
            f"{record['base16_us'] / record['ours_us']:.2f}x",
        ]
        share = record["bytes"] / record["ours_us"] * 1e6 / limits.bandwidth if limits else 0.0
        rows.append(row + ([f"{100 * share:.0f} %"] if limits else []))
    return f"{found.provenance}\n\n{table(headers, rows)}"


def kv4_write(results: Path) -> str:
    """The fused write of q, k and v; what its bytes are stands in docs/kv4.md."""
    path = results / "kv4-h200.json"
    content: Entry = json.loads(path.read_text("utf-8")) if path.exists() else {}
    rows = [
        [
            f"{record['heads_q']}/{record['heads_kv']} x {record['head_dim']}",
            f"{record['tokens']:,}",
            f"{record['us']:,.1f}",
            f"{record['bytes'] / record['us'] / 1e6:.2f}",
            f"{100 * record['fraction']:.0f} %",
        ]
        for record in content.get("write", ())
    ]
    return table(["heads (q/kv x dim)", "tokens", "write, µs", "TB/s", "of copy bandwidth"], rows) if rows else ""


def kv_capacity(results: Path) -> str:
    """Tokens of context that fit in 100 GB: arithmetic on the page format, measured nowhere."""
    rows = []
    for model, (layers, heads, dim) in KV_MODELS.items():
        full = layers * heads * KV_SIDES * dim * 2
        packed = layers * heads * KV_SIDES * (dim // 2 + 4)
        row = [
            model,
            f"{full:,}",
            f"{packed:,}",
            f"{10**11 // full:,}",
            f"{10**11 // packed:,}",
            f"{full / packed:.2f}x",
        ]
        rows.append(row)
    headers = [
        "model",
        "bytes per token, 16 bit",
        "bytes per token, KV4",
        "tokens in 100 GB, 16 bit",
        "tokens in 100 GB, KV4",
    ]
    return table([*headers, "ratio"], rows)


def bench(results: Path) -> str:
    """The whole model, GPU first, then the same command on a CPU."""
    parts = []
    for name in ("bench-h200", "bench-cpu"):
        found = load_bench(results, name)
        if found is not None:
            parts += [
                found.provenance,
                *(_bench_model(found, model) for model in _distinct(r["model"] for r in found.records)),
            ]
            if name == "bench-cpu":
                parts.append("These speeds say nothing about GPUs: the CPU path is the reference, not a kernel.")
    return "\n\n".join(parts)


def breakdown(results: Path) -> str:
    """Where a decode step's time goes, by what its kernels are for; parts overlap, so their sum may exceed the step."""
    found = load_bench(results)
    steps = found.header.get("breakdown", []) if found is not None else []
    if not steps:
        return ""
    parts = _distinct(name for step in steps for name in step["parts_us"])
    rows = []
    for step in steps:
        cells = [f"{step['parts_us'][name]:,.0f}" if name in step["parts_us"] else "" for name in parts]
        launches = sum(step["launches"].values())
        rows.append(
            [
                step["model"],
                f"{step['batch']:,}",
                f"{step['step_us']:,.0f}",
                *cells,
                f"{-step['gap_us']:,.0f}",
                f"{launches:,}",
            ]
        )
    return table(["model", "batch", "step, µs", *parts, "overlap", "launches"], rows)


def _bench_model(found: Results, model: str) -> str:
    records = [record for record in found.records if record["model"] == model]
    baselines = _distinct(name for record in records for name in record.get("baselines") or {})
    headers = ["test", "recipe", "activations", "KV", "batch", "tokens/s", "ms/step", "peak GiB"]
    headers += [f"over {name}" for name in baselines]
    rows = []
    for record in records:
        others = record.get("baselines") or {}
        rows.append(
            [
                str(record["test"]),
                str(record["recipe"]),
                str(record["act"]),
                f"{record['kv']} bit",
                f"{record['batch']:,}",
                _number(record["tok_s"]),
                f"{record['step_ms']:.2f}" if record.get("step_ms") else "",
                f"{record['peak_gib']:.1f}" if record.get("peak_gib") else "",
                *(f"{record['tok_s'] / others[name]:.2f}x" if others.get(name) else "" for name in baselines),
            ]
        )
    return f"### {model}\n\n{table(headers, rows, text_columns=4)}"


def _gemm_summary(found: Results) -> str:
    """Geometric means over the layers of a model by M."""
    present = [key for key in BASELINES if any(record.get(key) for record in found.records)]
    headers = ["model", "layout", "M", "TOPS", *(f"over {BASELINES[key]}" for key in present)]
    is_quantised = any("with_quantise_us" in record for record in found.records)
    if is_quantised:
        headers.append("quantised, over bf16")
    rows = []
    for model, layout, m in _distinct((r["model"], r["layout"], r["m"]) for r in found.records):
        chosen = [r for r in found.records if (r["model"], r["layout"], r["m"]) == (model, layout, m)]
        operations = sum(2 * r["m"] * r["n"] * r["k"] for r in chosen)
        row = [model, layout, f"{m:,}", f"{operations / sum(r['ours_us'] for r in chosen) / 1e6:,.0f}"]
        for key in present:
            ratios = [r[key] / r["ours_us"] for r in chosen if r.get(key)]
            row.append(f"{geometric_mean(ratios):.2f}x" if len(ratios) == len(chosen) else "")
        if is_quantised:
            ratios = [r["bf16_us"] / r["with_quantise_us"] for r in chosen if "with_quantise_us" in r]
            row.append(f"{geometric_mean(ratios):.2f}x" if len(ratios) == len(chosen) else "")
        rows.append(row)
    text = (
        "Geometric mean over the GEMMs of one decoder layer, TOPS of their sum; above 1x is faster than the baseline."
    )
    if is_quantised:
        text += " `quantised`: the kernel that makes the activations' codes and the GEMM, against the bf16 GEMM alone."
    return f"{text}\n\n{table(headers, rows, text_columns=2)}"


def _gemm_later(found: Results) -> str:
    """A later kernel beside the one of the records, timed in one process."""
    records: list[Entry] = found.header["later"]
    rows = []
    for layout in _distinct(record["layout"] for record in records):
        chosen = sorted((r for r in records if r["layout"] == layout), key=lambda r: _layer_rank(r["layer"]))
        for record in chosen:
            gains = [record[key] / record["ours_us"] for key in ("before_us", "fp8_us")]
            times = [f"{record[key]:,.1f}" for key in ("before_us", "ours_us")]
            rows.append([record["layer"], layout, *times, *(f"{gain:.3f}x" for gain in gains)])
        if len(chosen) == len({r["layer"] for r in found.records}):
            means = [geometric_mean([r[key] / r["ours_us"] for r in chosen]) for key in ("before_us", "fp8_us")]
            rows.append(["geometric mean", layout, "", "", *(f"{mean:.3f}x" for mean in means)])
    first = records[0]
    headers = ["layer", "layout", "before, µs", "now, µs", "over before", "over fp8"]
    text = (
        f"The kernel of commit {first['commit'][:12]} and the one of all other tables here in turns, in one process, "
        "measured as those."
    )
    return f"### Later: {first['model']}, M = {first['m']:,}\n\n{text}\n\n{table(headers, rows, text_columns=2)}"


def _gemm_shapes(records: Sequence[Entry]) -> str:
    sizes = sorted({record["m"] for record in records})
    layers = sorted({(r["layer"], r["n"], r["k"]) for r in records}, key=lambda item: (_layer_rank(item[0]), item))
    by_key = {(r["layer"], r["n"], r["k"], r["m"]): r for r in records}
    rows = []
    for layer, n, k in layers:
        cells = []
        for m in sizes:
            record = by_key.get((layer, n, k, m))
            cells.append(f"{record['ours_us']:.1f} ({record['bf16_us'] / record['ours_us']:.2f}x)" if record else "")
        rows.append([layer, f"{n} x {k}", *cells])
    headers = ["layer", "N x K", *(f"M = {m}" for m in sizes)]
    return f"Time in µs, and speed over cuBLAS bf16.\n\n{table(headers, rows, text_columns=2)}"


def _gemm_bandwidth(found: Results) -> str:
    limits = found.limits
    decode = [record for record in found.records if record["m"] <= 16]
    if limits is None or not decode:
        return ""
    rows = []
    for record in sorted(decode, key=lambda r: (r["layout"], -r["weight_bytes"], r["m"])):
        rate = record["weight_bytes"] / record["ours_us"] * 1e6
        where = f"{record['model']} {record['layer']}"
        share = f"{100 * rate / limits.bandwidth:.0f} %"
        rows.append(
            [
                where,
                record["layout"],
                f"{record['weight_bytes'] / 1e6:.1f}",
                f"{record['m']}",
                f"{rate / 1e12:.2f}",
                share,
            ]
        )
    headers = ["layer", "layout", "packed weights, MB", "M", "TB/s of weights", "of copy bandwidth"]
    return f"### Decode: bytes of weights over time\n\n{table(headers, rows, text_columns=2)}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def _layer_rank(layer: str) -> int:
    return LAYER_ORDER.index(layer) if layer in LAYER_ORDER else len(LAYER_ORDER)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
