"""`w4a4_manifest.json`: size and SHA-256 of every file of a checkpoint, and where its numbers come from.

It holds no time and no path of the machine, so that the same run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w4a4.configs.errors import CheckpointError
from w4a4.configs.json_file import read_json_object
from w4a4.export.checkpoint import MANIFEST_FILE

MANIFEST_VERSION = 1
SECTIONS = ("source", "calibration", "quality")
_TOOLS = ("w4a4", "torch", "transformers", "safetensors")


def build_manifest(folder: Path, extras: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the files now in `folder`.

    Args:
        extras: "source" (name, revision, sha256), "calibration" (data, tokens, token hash), "quality" (what was
            measured); a section left out is stored as null.
    """
    unknown = sorted(set(extras) - set(SECTIONS))
    if unknown:
        raise ValueError(f"unknown manifest sections {unknown}; the sections are {', '.join(SECTIONS)}")
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_FILE
    }
    return {
        "manifest_version": MANIFEST_VERSION,
        "files": files,
        **{section: extras.get(section) for section in SECTIONS},
        "tools": tool_versions(),
    }


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Indented JSON with a final newline, keys in the order given."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError where it is missing or malformed."""
    path = folder / MANIFEST_FILE
    if path.is_symlink() and path.resolve().parent != folder.resolve() or not path.is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST_FILE}", "without it hashes cannot be checked: fetch it again")
    manifest = read_json_object(path)
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    ):
        raise CheckpointError(
            f"{MANIFEST_FILE}: got {str(files)[:60]}, expected files with size and sha256", "fetch the checkpoint again"
        )
    return manifest


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tool_versions() -> dict[str, str]:
    """Python and the packages whose version may change a bit of the result."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _TOOLS}
