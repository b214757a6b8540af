"""What a benchmark says: one record per test, and its form as text, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CPU_NOTE = "these speeds say nothing about GPUs: the CPU path is the reference, not a kernel"


@dataclass(frozen=True)
class Record:
    """One test of one way to run a model.

    model:        name, with "random weights" where they are
    recipe:       "dual", ..., or "baseline"; act: "map", "a8", or "16"/"fp8" for baselines; kv: bits
    test:         "pp1024", "tg128@1024", "pp1024+tg512"; tok_s counts new tokens of all sequences (output tokens in the
                  combined test); spread is the relative standard deviation over `repetitions`
    step_ms:      one decode step, or the prefill of the whole batch; None where a test has both
    roofline:     the least time for the step's bytes and operations over the measured one
    composed:     True where tok_s was put together from measured parts and not run in one go
    baselines:    name -> tok_s of the same test
    """

    model: str
    size_gib: float
    recipe: str
    act: str
    kv: int
    path: str
    test: str
    batch: int
    seq: int
    gen: int
    tok_s: float
    spread: float
    repetitions: int
    step_ms: float | None
    peak_gib: float | None = None
    kv_tokens: int | None = None
    roofline: float | None = None
    composed: bool = False
    baselines: Mapping[str, float] = field(default_factory=dict)

    def with_baselines(self, baselines: Mapping[str, float]) -> Record:
        return replace(self, baselines=dict(baselines))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to what was measured; absent ones left out."""
        values: dict[str, Any] = {
            "model": self.model, "size_gib": round(self.size_gib, 2), "recipe": self.recipe, "act": self.act,
            "kv": self.kv, "path": self.path, "test": self.test, "batch": self.batch, "seq": self.seq, "gen": self.gen,
            "tok_s": _significant(self.tok_s), "spread": round(self.spread, 4), "repetitions": self.repetitions,
        }  # fmt: skip
        optional = {
            "step_ms": self.step_ms,
            "peak_gib": self.peak_gib,
            "kv_tokens": self.kv_tokens,
            "roofline": self.roofline,
        }
        values |= {key: _significant(value) for key, value in optional.items() if value is not None}
        if self.composed:
            values["composed"] = True
        if self.baselines:
            values["baselines"] = {name: _significant(value) for name, value in self.baselines.items()}
        return values


def _significant(value: float, digits: int = 5) -> float:
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


HEADER = ("model", "size", "w/a/kv", "path", "batch", "test", "tokens/s", "ms/step", "peak GiB", "of limit")


def header(records: Sequence[Record]) -> list[str]:
    return [*HEADER, *(f"over {name}" for name in _baseline_names(records))]


def rows(records: Sequence[Record]) -> list[list[str]]:
    """A line of text cells per record, in the order of `header`."""
    names = _baseline_names(records)
    return [_row(record, names) for record in records]


def _row(record: Record, names: Sequence[str]) -> list[str]:
    spread = f" ± {100 * record.spread:.1f} %" if record.repetitions > 1 else ""
    cells = [
        record.model,
        f"{record.size_gib:.2f} GiB",
        f"{'bf16' if record.recipe == 'baseline' and record.act == '16' else record.recipe}/{record.act}/{record.kv}",
        record.path,
        str(record.batch),
        record.test + (" (composed)" if record.composed else ""),
        _number(record.tok_s) + spread,
        "-" if record.step_ms is None else f"{record.step_ms:.2f}",
        "-" if record.peak_gib is None else f"{record.peak_gib:.1f}",
        "-" if record.roofline is None else f"{100 * record.roofline:.0f} %",
    ]
    for name in names:
        other = record.baselines.get(name)
        cells.append("-" if not other else f"{record.tok_s / other:.2f}x")
    return cells


def markdown(records: Sequence[Record]) -> str:
    lines = [header(records), ["---"] * len(header(records)), *rows(records)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_csv(records: Sequence[Record]) -> str:
    """One line per record with plain numbers; a column per baseline."""
    names = _baseline_names(records)
    columns = ["model", "size_gib", "recipe", "act", "kv", "path", "test", "batch", "seq", "gen", "tok_s", "spread",
               "repetitions", "step_ms", "peak_gib", "kv_tokens", "roofline", "composed"]  # fmt: skip
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*columns, *(f"{name}_tok_s" for name in names)])
    for record in records:
        values = record.to_dict()
        others = values.get("baselines", {})
        writer.writerow([*(values.get(key, "") for key in columns), *(others.get(name, "") for name in names)])
    return buffer.getvalue().rstrip("\n")


def _baseline_names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.baselines))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
