"""Markdown tables, and the blocks of a page that are generated from results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """A Markdown table; the first `text_columns` columns are left-aligned, the others, numbers, right-aligned."""
    cells = [[value.replace("|", "\\|").replace("\n", " ") for value in row] for row in rows]
    rule = [":---" if index < text_columns else "---:" for index in range(len(headers))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(headers), rule, *cells])


def block_names(page: str) -> list[str]:
    """Names of the generated blocks of a page, in order. Raises ValueError if a mark is not closed or stands twice."""
    names = re.findall(r"^<!-- generated: ([a-z0-9-]+) -->$", page, re.M)
    ends = re.findall(r"^<!-- end: ([a-z0-9-]+) -->$", page, re.M)
    if names != ends or len(set(names)) != len(names):
        raise ValueError(f"marks of generated blocks do not match: begin {names}, end {ends}")
    return names


def replace_block(page: str, name: str, body: str) -> str:
    """The page with the text between the two marks of block `name` replaced by `body` (empty: marks alone)."""
    begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
    before, rest = page.split(begin, 1)
    after = rest.split(end, 1)[1]
    return before + begin + (f"\n{body.strip()}\n\n" if body.strip() else "") + end + after
