from __future__ import annotations

import errno

import click
import pytest

from w4a4.cli.failure import explain, report_failure
from w4a4.configs import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.W4A4Error("x"), 1),
        (errors.UsageError("x"), 2),
        (errors.NotFoundError("x"), 3),
        (errors.UnsupportedError("x"), 4),
        (errors.CheckpointError("x"), 5),
        (errors.NumericsError("x"), 6),
        (errors.ResourceError("x"), 7),
        (errors.StoppedError("x"), 75),
        (click.UsageError("x"), 2),
        (click.ClickException("x"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (MemoryError(), 7),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), 7),
        (RuntimeError("x"), 1),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 7),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2),
        (OSError(errno.EROFS, "Read-only file system", "/x"), 2),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x"), 2),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/x"), 2),
        (OSError(errno.EIO, "Input/output error", "/x"), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_every_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert explain(error)[2] == code


def test_out_of_memory_of_a_gpu_is_a_resource_error() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    message, hint, code = explain(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert code == 7
    assert message == "out of memory: CUDA out of memory. Tried to allocate 2 GiB"
    assert "--device cpu" in hint


def test_one_line_one_hint_and_a_traceback_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise errors.CheckpointError("it is broken", "fetch it again")
    except errors.CheckpointError as error:
        assert report_failure(error, verbosity=0) == 5
        assert capsys.readouterr().err == "error: it is broken\n  try: fetch it again\n"
        assert report_failure(error, verbosity=1) == 5
        assert "Traceback" not in capsys.readouterr().err
        assert report_failure(error, verbosity=2) == 5
        assert "Traceback" in capsys.readouterr().err


def test_what_files_and_libraries_say_stays_one_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(errors.CheckpointError("got \x1b[2J\nand more", "fetch\nit"), verbosity=0) == 5
    assert capsys.readouterr().err == "error: got \\x1b[2J and more\n  try: fetch it\n"


def test_our_bugs_say_so() -> None:
    message, hint, _ = explain(ZeroDivisionError("division by zero"))
    assert message == "this is a bug: ZeroDivisionError: division by zero"
    assert "-vv" in hint
