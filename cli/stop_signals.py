"""SIGINT and SIGTERM as a wish to stop at the next safe point; a second one does not wait. What to type to go on."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

import click

from w4a4.configs.errors import StoppedError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], object] | int | None


def resumable(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A command that goes on where it stopped when it is given again, and says so whatever stops it."""

    @wraps(function)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        again = f"{shlex.join(['w4a4', *sys.argv[1:]])}  # what was finished is kept"
        try:
            return function(*arguments, **options)
        except StoppedError as error:
            raise StoppedError(error.message, again) from error
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(again) from error

    return run


class StopSignals:
    """While entered, the first signal sets `is_requested`; the second raises KeyboardInterrupt where it strikes."""

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: dict[int, Handler] = {}

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
