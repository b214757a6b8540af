"""SIGINT and SIGTERM as a wish to stop at the next safe point; a second one does not wait."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import click


class StopSignals:
    """While entered, the first signal sets `is_requested`; the second raises KeyboardInterrupt where it strikes."""

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        click.echo("stopping after this layer; once more to stop at once", err=True)
