"""The one exception tree. The command line turns each into one line, a hint and its exit code.

W4A4Error                 1   our bug, unless a subclass says otherwise
  UsageError              2   what was asked makes no sense
  NotFoundError           3   missing, gated or offline
  UnsupportedError        4   model, shape or GPU we do not run
  CheckpointError         5   corrupt or untrusted file
  NumericsError           6   not finite, or the quality gate failed
  ResourceError           7   memory or disk
  StoppedError           75   stopped, can resume
"""

from __future__ import annotations


class W4A4Error(Exception):
    """A failure with something useful to type next.

    Args:
        message: one line: what happened, with the value received and what was expected.
        hint: one line: what to type or change.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(W4A4Error):
    exit_code = 2


class NotFoundError(W4A4Error):
    exit_code = 3


class UnsupportedError(W4A4Error):
    exit_code = 4


class CheckpointError(W4A4Error):
    exit_code = 5


class NumericsError(W4A4Error):
    exit_code = 6


class ResourceError(W4A4Error):
    exit_code = 7


class StoppedError(W4A4Error):
    exit_code = 75
