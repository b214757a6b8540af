"""docs/format.md is normative, so it names every tensor, key and feature that the code knows."""

import re
from pathlib import Path

import pytest

from w4a4.export.packed_linear import SUFFIXES
from w4a4.export.quantization_config import _SCHEMA, FEATURES, FORMAT_VERSION

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")


def rows_of(section: str) -> dict[str, str]:
    """First cell -> rest of the row, of the tables in a numbered section; a cell with several names gives several."""
    body = DOCUMENT.split(f"\n## {section}")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ", 1) for line in body.splitlines() if line.startswith("| `")]
    return {name: rest for cell, rest in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_version_is_the_one_in_the_title() -> None:
    assert DOCUMENT.startswith(f"# Packed checkpoint, format {FORMAT_VERSION}\n")


def test_tensors_of_a_linear() -> None:
    assert set(rows_of("3.")) == {f".{suffix}" for suffix in SUFFIXES}


def test_keys_and_features() -> None:
    assert set(rows_of("2.")) == set(_SCHEMA) | set(FEATURES)


@pytest.mark.parametrize("section", [key for key, rule in _SCHEMA.items() if isinstance(rule, dict)])
def test_nested_keys(section: str) -> None:
    rule = _SCHEMA[section]
    assert isinstance(rule, dict)
    text = rows_of("2.")[section]
    missing = [key for key in rule if not re.search(rf"[`\"]{key}[`\"]", text)]
    assert missing == []
