"""One job at a time on one output: an advisory lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from w4a4.configs.errors import UsageError
from w4a4.export.durable_file import disk_errors


class OutputLock:
    """A lock on the file `path`, whose folder exists. Nothing has to be cleaned up after a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises UsageError at once where another process holds the lock."""
        while self._descriptor is None:
            with disk_errors(self.path):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise UsageError(
                    f"another job (process {holder}) is writing to {self.path.parent}",
                    "wait for it to end, stop it, or choose another output with -o",
                ) from error
            # The holder before us may have removed the file between our open and our lock: then try again.
            if self.path.exists() and os.path.samestat(os.fstat(descriptor), self.path.stat()):
                self._descriptor = descriptor
                with disk_errors(self.path):
                    os.truncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
            else:
                os.close(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
