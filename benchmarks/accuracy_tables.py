"""Tables of `docs/accuracy.md` from `results/accuracy*.json` and `results/tasks*.json` (schema: README.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from markdown_tables import table

RECIPES = ("dual", "fmpq-int8", "fmpq", "quik", "w8a8", "w4a16", "rtn")  # the order of rows; others follow by name
ACTIVATIONS = {"a16": "16 bit", "a8": "8 bit", "map": "4/8 bit map"}


@dataclass(frozen=True)
class AccuracyRecord:
    """One model, recipe and seed, scored once. Shares are 0 to 1, KL in nats per token."""

    model: str
    source: str  # what the source model is, for example "dequantised GGUF (Q4_1)"
    recipe: str
    act: str  # "map", "a8" or "a16"
    kv: int  # bits of the KV cache: 4 or 16
    text: str
    tokens: int  # scored
    window: int
    calibration: dict[str, Any]  # text, samples, seq, seed (and token_hash)
    weight_bits: float  # average over the packed linears, scales included
    mac_share_4bit: float  # share of the linears' multiplications with 4-bit activations and weights
    ppl: float
    ratio: float  # over the source model on the same tokens
    kl: float
    top1: float
    commit: str
    variant: str = ""  # what differs from the recipe: such records make the ablation

    @property
    def group(self) -> tuple[str, str, str, int, int]:
        return self.model, self.text, self.source, self.tokens, self.window

    @property
    def row(self) -> tuple[int, str, str, int, int]:
        rank = RECIPES.index(self.recipe) if self.recipe in RECIPES else len(RECIPES)
        return rank, self.recipe, self.variant, list(ACTIVATIONS).index(self.act), -self.kv


@dataclass(frozen=True)
class TaskRecord:
    """One score of a multiple-choice or few-shot task."""

    model: str
    recipe: str  # "source" for the unquantised model
    act: str
    kv: int
    task: str
    metric: str
    value: float
    stderr: float
    examples: int
    harness: str  # name and version
    commit: str


Record = TypeVar("Record", AccuracyRecord, TaskRecord)


def load_records(results: Path, pattern: str, kind: type[Record]) -> list[Record]:
    """Records of every matching file. Raises ValueError for a missing or unknown key, with the file's name."""
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    records = []
    for path in sorted(results.glob(pattern)):
        for entry in json.loads(path.read_text(encoding="utf-8"))["records"]:
            if not needed <= entry.keys() <= known:
                wrong = sorted(needed - entry.keys()), sorted(entry.keys() - known)
                raise ValueError(f"{path.name}: a record lacks {wrong[0]} and has unknown {wrong[1]}")
            records.append(kind(**entry))
    return records


def accuracy(results: Path) -> str:
    """One section per model and text: every recipe beside the source model."""
    records = [record for record in load_records(results, "accuracy*.json", AccuracyRecord) if not record.variant]
    return "\n\n".join(_section(list(group)) for _, group in _grouped(records))


def ablation(results: Path) -> str:
    """The same for records with a `variant`, one line each."""
    records = [record for record in load_records(results, "accuracy*.json", AccuracyRecord) if record.variant]
    return "\n\n".join(_section(list(group)) for _, group in _grouped(records))


def tasks(results: Path) -> str:
    records = load_records(results, "tasks*.json", TaskRecord)
    if not records:
        return ""
    rows = [
        [
            record.model,
            record.task,
            record.recipe,
            "" if record.recipe == "source" else ACTIVATIONS[record.act],
            f"{record.kv} bit",
            f"{100 * record.value:.1f} ± {100 * record.stderr:.1f}",
            f"{record.examples:,}",
        ]
        for record in records
    ]
    harnesses = ", ".join(sorted({record.harness for record in records}))
    headers = ["model", "task", "recipe", "activations", "KV cache", "score, %", "examples"]
    return f"{table(headers, rows, text_columns=5)}\n\nScored with {harnesses}; ± is one standard error."


def _grouped(records: list[AccuracyRecord]) -> Any:
    return groupby(sorted(records, key=lambda record: record.group), key=lambda record: record.group)


def _section(records: list[AccuracyRecord]) -> str:
    first = records[0]
    source_ppl = _source_ppl(records)
    variants = any(record.variant for record in records)
    headers = ["recipe", *(["variant"] if variants else []), "activations", "KV cache", "weight bits", "MACs at 4 bit"]
    headers += ["perplexity", "ratio", "KL, nats", "same top-1", "seeds"]
    filler = [""] if variants else []
    rows = [["source", *filler, "16 bit", "16 bit", "", "", f"{source_ppl:.2f}", "1", "0", "100 %", ""]]
    order = list(dict.fromkeys(record.variant for record in records))  # variants stand as in their file

    def place(record: AccuracyRecord) -> tuple[int, tuple[int, str, str, int, int]]:
        return order.index(record.variant), record.row

    for _, group in groupby(sorted(records, key=place), key=place):
        runs = list(group)
        run = runs[0]
        rows.append(
            [
                run.recipe,
                *([run.variant] if variants else []),
                ACTIVATIONS[run.act],
                f"{run.kv} bit",
                f"{fmean(run.weight_bits for run in runs):.2f}",
                f"{100 * fmean(run.mac_share_4bit for run in runs):.1f} %",
                _spread([run.ppl for run in runs], 2),
                _spread([run.ratio for run in runs], 3),
                _spread([run.kl for run in runs], 3),
                f"{100 * fmean(run.top1 for run in runs):.1f} %",
                f"{len(runs)}",
            ]
        )
    body = table(headers, rows, text_columns=4 if variants else 3)
    return f"### {first.model}, {first.text}\n\n{_provenance(records)}\n\n{body}"


def _source_ppl(records: Sequence[AccuracyRecord]) -> float:
    """The source model's perplexity, which every record of a group must imply alike."""
    implied = [record.ppl / record.ratio for record in records]
    if max(implied) > 1.001 * min(implied):
        raise ValueError(
            f"{records[0].model}, {records[0].text}: records imply source perplexities from {min(implied):.4f} to "
            f"{max(implied):.4f}; they were not scored against the same source on the same tokens"
        )
    return fmean(implied)


def _provenance(records: Sequence[AccuracyRecord]) -> str:
    first = records[0]
    calibrations = []
    for record in records:
        known = record.calibration
        text = f"{known['samples']:,} x {known['seq']:,} tokens of {known.get('text', 'wikitext2 train')}"
        if text not in calibrations:
            calibrations.append(text)
    seeds = sorted({str(record.calibration["seed"]) for record in records})
    commits = sorted({record.commit[:12] for record in records})
    return (
        f"{first.tokens:,} tokens scored in windows of {first.window:,}; source: {first.source}; calibration: "
        f"{'; '.join(calibrations)}; {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}; "
        f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}."
    )


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean, and the range where several seeds were run."""
    mean = f"{fmean(values):,.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
