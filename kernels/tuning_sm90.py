"""Which plan a product runs with: a table of measured choices, and a rule for shapes that were not measured.

`tuning_sm90.json` is written by `python benchmarks/gemm_h200.py --tune` on the GPU it names. An entry holds for its
rows, columns and weight bits and for up to `tokens` tokens; `us` is what was measured, the reason for the choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from w4a4.kernels.gemm_sm90_variant import Plan, Variant

TABLE = Path(__file__).parent / "tuning_sm90.json"

Key = tuple[tuple[int, ...], int, int]  # weight bits, rows, columns


def choose(weight_bits: tuple[int, ...], rows: int, columns: int, tokens: int) -> Plan:
    """The plan for tokens x columns activations and rows x columns weights."""
    for limit, plan in _table().get((weight_bits, rows, columns), ()):
        if tokens <= limit:
            return plan
    return default_plan(weight_bits, tokens)


def default_plan(weight_bits: tuple[int, ...], tokens: int) -> Plan:
    """What suits most measured shapes: the smallest tile that holds all tokens, shared along K, until a GPU is full."""
    for size, stages in ((8, 5), (16, 5), (32, 8), (64, 6)):
        if tokens <= size:
            variant = Variant(
                weight_bits, size, 2, 2, stages, int4_blocks=2, weights_once=True, looks_ahead=True, shares_tiles=True,
                l2_steps=4,
            )  # fmt: skip
            return Plan(variant, share="all")
    if tokens <= 256:
        return Plan(Variant(weight_bits, 128, 2, 2, 5, looks_ahead=True), 2)
    if len(weight_bits) == 2:
        return Plan(Variant(weight_bits, 256, 2, 2, 4, packs_first=True), 8)
    return Plan(Variant(weight_bits, 256, 2, 2, 4, store_buffers=2 if weight_bits == (4,) else 1), 8)


def variants() -> list[Variant]:
    """Every variant that `choose` can return for the recipes' layouts: what `w4a4 compile` compiles."""
    found = [plan.variant for entries in _table().values() for _, plan in entries]
    for bits in ((4,), (8,), (4, 8), (4, 4)):
        found += [default_plan(bits, tokens).variant for tokens in (8, 16, 32, 64, 256, 257)]
    return list(dict.fromkeys(found))


def entry(weight_bits: tuple[int, ...], rows: int, columns: int, tokens: int, plan: Plan, us: float) -> dict[str, Any]:
    """One line of the table."""
    defaults = {field.name: field.default for field in fields(Variant)}
    variant = {k: v for k, v in asdict(plan.variant).items() if k != "weight_bits" and v != defaults[k]}
    return {
        "weight_bits": list(weight_bits),
        "rows": rows,
        "columns": columns,
        "tokens": tokens,
        "us": round(us, 2),
        "share": plan.share,
        "token_group": plan.token_group,
        "variant": variant,
    }


def parse(table: Mapping[str, Any]) -> dict[Key, list[tuple[int, Plan]]]:
    """Plans by shape, each with the most tokens it holds for, ascending."""
    found: dict[Key, list[tuple[int, Plan]]] = {}
    for line in table["plans"]:
        bits = tuple(line["weight_bits"])
        plan = Plan(Variant(bits, **line["variant"]), line["token_group"], line["share"])
        found.setdefault((bits, line["rows"], line["columns"]), []).append((line["tokens"], plan))
    for entries in found.values():
        entries.sort(key=lambda pair: pair[0])
    return found


@cache
def _table() -> dict[Key, list[tuple[int, Plan]]]:
    return parse(json.loads(TABLE.read_text()))
