"""Where words go: data to standard output, everything else to standard error; no bars where no one watches."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SCHEMA_VERSION: Final = 1


class Console:
    """The two streams of one run, and how much to say on the second. `verbosity`: -1 quiet, 0, 1 (-v), 2 (-vv)."""

    def __init__(self) -> None:
        self.verbosity = 0

    def say(self, line: str) -> None:
        """One line for people, on standard error; nothing with -q."""
        if self.verbosity >= 0:
            click.echo(printable(line), err=True)

    def data(self, text: str) -> None:
        """A result, on standard output."""
        click.echo(printable(text))

    def document(self, name: str, content: Mapping[str, Any]) -> None:
        """One JSON document on standard output, in ASCII, marked with what it is and the version of its schema."""
        document = {"schema": f"w4a4.{name}", "schema_version": SCHEMA_VERSION, **content}
        click.echo(json.dumps(document, indent=2, allow_nan=False, default=str))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns aligned with spaces, on standard output; numbers to the right."""
        self.data(format_table(header, rows))

    def progress(self, label: str) -> Progress:
        """A bar on a terminal, one plain line per step elsewhere; use as a context manager."""
        return Progress(label, is_bar=sys.stderr.isatty() and self.verbosity >= 0, is_quiet=self.verbosity < 0)

    def set_verbosity(self, verbosity: int) -> None:
        self.verbosity = verbosity
        level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
        logging.getLogger("w4a4").setLevel(level)


class PrintableFormatter(logging.Formatter):
    """What the rooms below log, safe to show."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class Progress:
    """Steps of known number. `step` may be handed out as a callback."""

    def __init__(self, label: str, *, is_bar: bool, is_quiet: bool = False) -> None:
        self._label = label
        self._is_bar = is_bar
        self._is_quiet = is_quiet
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._begin = time.monotonic()

    def __enter__(self) -> Progress:
        self._begin = time.monotonic()
        if self._is_bar:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn(self._label),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=RichConsole(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=None, note="")
        return self

    def step(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` steps are finished; `note` is what the last one found."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif not self._is_quiet:
            seconds = time.monotonic() - self._begin
            click.echo(f"{self._label} {done}/{total}  {seconds:.1f} s{'  ' + note if note else ''}", err=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def printable(text: str) -> str:
    """`text` with all but its line ends spelled out that a terminal would obey or could not show.

    Names and values come from files of strangers: \x1b[2J must not clear the screen of who inspects them.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: str) -> str:
    """`text` as `printable`, on one line: other libraries explain themselves in paragraphs."""
    return printable(" ".join(text.split()))


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Header and rows as aligned text; a column whose cells are all numbers is set to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    is_number = [
        bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(header))
    ]
    lines = []
    for line in [list(header), *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of 1000: "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
