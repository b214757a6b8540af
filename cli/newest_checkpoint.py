"""The newest checkpoint that `quantize` wrote, remembered outside the repository for commands that are given none."""

from __future__ import annotations

import json
import os
from pathlib import Path

from w4a4.configs.errors import NotFoundError

_FILE = "newest-checkpoint.json"


def state_folder() -> Path:
    """$W4A4_STATE, else $XDG_STATE_HOME/w4a4, else ~/.local/state/w4a4."""
    chosen = os.environ.get("W4A4_STATE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "w4a4"


def remember_checkpoint(path: Path) -> bool:
    """Remember `path` as the newest. False when the state folder cannot be written, which is no error."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{_FILE}.{os.getpid()}.part"
        part.write_text(json.dumps({"path": str(path.resolve())}) + "\n", encoding="utf-8")
        part.replace(folder / _FILE)
    except OSError:
        return False
    return True


def newest_checkpoint() -> Path:
    """The remembered checkpoint. Raises NotFoundError with what to type when there is none, or it is gone."""
    hint = "name one, or make one: w4a4 quantize smollm2-135m"
    try:
        document = json.loads((state_folder() / _FILE).read_text(encoding="utf-8"))
        path = Path(document["path"])
    except (OSError, ValueError, KeyError, TypeError):
        raise NotFoundError("no checkpoint was named and `w4a4 quantize` has not written one yet", hint) from None
    if not (path / "config.json").is_file():
        raise NotFoundError(f"no checkpoint was named and the newest one, {path}, is gone", hint)
    return path
