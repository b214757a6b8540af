"""Text that comes with this package, compressed and checked against its SHA-256."""

from __future__ import annotations

import hashlib
import lzma
from importlib.resources import files

from w4a4.configs.errors import CheckpointError

PYTHON_STDLIB = {
    "train": "4c889883761bf2624e246ec096d91f3657f5e7b596b2f23df7ce0d7d7123d836",
    "validation": "32b608cbec248a4f8236215427400efd619df3960ff2176b530d9d494953a095",
    "test": "f1687e6b20fdfda82138e0f37c7f48991c0b8a115763c55dfb5c9da0ea61eb02",
}
"""SHA-256 of each split of the standard library's modules (`data/python-stdlib/README.md`)."""


def unpacked(folder: str, name: str, sha256: str) -> str:
    """The text of `calibrate/data/<folder>/<name>`, an .xz file of UTF-8.

    Raises:
        CheckpointError: the file cannot be read, or is not the one that shipped.
    """
    resource = files("w4a4.calibrate") / "data" / folder / name
    try:
        raw = lzma.decompress(resource.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise CheckpointError(f"the bundled text {name} cannot be read: {error}", "reinstall w4a4") from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != sha256:
        raise CheckpointError(
            f"the bundled text {name} is damaged: SHA-256 {digest}, expected {sha256}", "reinstall w4a4"
        )
    return raw.decode("utf-8")


def python_stdlib(split: str) -> str:
    """One split of Python's standard library, the same whatever Python runs."""
    return unpacked("python-stdlib", f"{split}.py.xz", PYTHON_STDLIB[split])
