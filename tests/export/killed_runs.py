"""Kill a run at every call that changes the disk, run it again, and compare with a run that was never killed.

A script of its own, because each run is killed by `os._exit` in a forked process: `killed_runs.py FOLDER`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from w4a4.configs.errors import UsageError

KILLED = 77
CALLS = ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir")


def load_tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_checkpoint", Path(__file__).with_name("tiny_checkpoint.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kill_before_call(number: int) -> None:
    """Make the number-th disk-changing call of this process its end."""
    calls = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os._exit(KILLED)
            return real(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def killed_run(tiny: ModuleType, output: Path, number: int) -> bool:
    """Run in a child that dies before its number-th call; whether it did die."""
    child = os.fork()
    if child == 0:
        kill_before_call(number)
        tiny.write(output)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), status
    return status == KILLED


def main(folder: Path) -> int:
    tiny = load_tiny()
    os.fsync = lambda descriptor: None  # a killed process loses nothing the kernel has; a flush costs most of the time
    tiny.write(folder / "whole")
    expected = tiny.bytes_of(folder / "whole")
    number = 1
    while killed_run(tiny, folder / f"killed{number}", number):
        output = folder / f"killed{number}"
        if output.exists():  # the rename was done: it must be whole, and the same command says that it is there
            assert tiny.bytes_of(output) == expected, number
            try:
                tiny.write(output)
            except UsageError as error:
                assert "exists" in error.message
            else:
                raise AssertionError(f"{output} was written again")
        else:
            tiny.write(output)
        assert tiny.bytes_of(output) == expected, number
        left = [path.name for path in folder.iterdir() if path.name.startswith(f".killed{number}.")]
        assert not left, (number, left)
        number += 1
    print(number - 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
