"""JSON files of a model folder, which may come from a stranger: bounded, and an object or an error of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from w4a4.configs.errors import CheckpointError

MAX_JSON_BYTES: Final = 100_000_000


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file `path`, which is there.

    Raises:
        CheckpointError: over 100 MB, not JSON (or nested without end), or not an object.
    """
    hint = "fetch or write the file again"
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path.name}: got {size:,} bytes, expected at most {MAX_JSON_BYTES:,}", hint)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not JSON ({error})", hint) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: got {type(value).__name__}, expected a JSON object", hint)
    return value
