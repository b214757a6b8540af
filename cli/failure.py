"""From an exception to one line, a hint and an exit code (DESIGN.md section 6). A traceback only with -vv."""

from __future__ import annotations

import errno
import traceback

import click

from w4a4.cli.console import one_line
from w4a4.configs.errors import W4A4Error

INTERRUPTED = 130
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATH = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def report_failure(error: BaseException, verbosity: int) -> int:
    """Say on standard error what `error` means and return the exit code of the process."""
    if verbosity >= 2:
        traceback.print_exception(error)
    message, hint, code = explain(error)
    if message:
        click.echo(f"error: {one_line(message)}", err=True)
    if hint:
        click.echo(f"  try: {one_line(hint)}", err=True)
    return code


def explain(error: BaseException) -> tuple[str, str, int]:
    """(what happened, what to type next, exit code) for any exception."""
    if isinstance(error, W4A4Error):
        return error.message, error.hint, error.exit_code
    if isinstance(error, click.UsageError):
        context = error.ctx
        return error.format_message(), f"{context.command_path if context else 'w4a4'} --help", 2
    if isinstance(error, click.ClickException):
        return error.format_message(), "", 2
    if isinstance(error, KeyboardInterrupt | click.Abort):
        cause = error.__cause__ if isinstance(error, click.Abort) else error  # click wraps what Ctrl-C raised
        return "interrupted", str(cause or ""), INTERRUPTED
    if shortage := memory_shortage(error):
        return f"out of memory: {shortage}", "fewer --samples, a shorter --seq, or --device cpu", 7
    if isinstance(error, OSError):
        return _explain_os_error(error)
    return (
        f"this is a bug: {type(error).__name__}: {error}",
        "the same command with -vv shows where it happened; please report it",
        1,
    )


def memory_shortage(error: BaseException) -> str:
    """What an allocation that failed has to say, in one line; empty for every other error.

    PyTorch's CPU allocator has no exception of its own: it raises a RuntimeError that names itself.
    """
    is_shortage = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not is_shortage and not (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return ""
    return next(iter(str(error).splitlines()), "an allocation failed")


def _explain_os_error(error: OSError) -> tuple[str, str, int]:
    where = f" ({error.filename})" if error.filename else ""
    message = f"{error.strerror or error}{where}"
    if error.errno in _DISK:
        return message, "free some disk, or write elsewhere with -o", 7
    if error.errno == errno.ENOMEM:
        return message, "fewer --samples or a shorter --seq", 7
    if error.errno in _PATH:
        return message, "choose another path", 2
    if isinstance(error, FileNotFoundError):
        return message, "check the path", 3
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return message, "choose a folder that you may write, with -o", 2
    return message, "", 1
