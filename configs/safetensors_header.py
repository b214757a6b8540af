"""The header of a safetensors file: checked before anything maps the file, and always written the same.

The format is 8 bytes of header length (little endian), a JSON object, then the tensors' bytes. Everything here treats
the file as untrusted, be it a source's or a checkpoint's: lengths are compared with the file's size before a byte of
the header is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4a4.configs.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its bytes stand at [start, start + num_bytes) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of `path`; tensor names to entries with absolute offsets.

    Raises:
        CheckpointError: truncated, oversized or malformed; offsets that overlap, leave gaps or leave the file.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _corrupt(path, "", f"{file_bytes} bytes", "at least 8 bytes of header length")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > MAX_HEADER_BYTES:
            raise _corrupt(path, "", f"a header of {header_bytes:,} bytes", f"at most {MAX_HEADER_BYTES:,}")
        if 8 + header_bytes > file_bytes:
            raise _corrupt(path, "", f"{file_bytes:,} bytes", f"at least {8 + header_bytes:,} (truncated header)")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "", f"a header that is not JSON ({error})", "a JSON object") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "", f"a header of type {type(header).__name__}", "a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = [_entry(path, name, value, data_start) for name, value in header.items()]
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != position:
            raise _corrupt(path, entry.name, f"bytes from {entry.start:,}", f"from {position:,} (no gap, no overlap)")
        position += entry.num_bytes
    if position != file_bytes:
        raise _corrupt(path, "", f"{file_bytes:,} bytes", f"{position:,} (the file is truncated or has a tail)")
    return {entry.name: entry for entry in entries}


def encode_header(entries: Sequence[TensorEntry]) -> bytes:
    """Header of a file whose tensors' bytes follow in the order of `entries`, padded to 8 bytes.

    Keep `in_file_order` so that every tensor is aligned to its item size.
    """
    position = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        stop = position + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, stop]}
        position = stop
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Widest item first, then by name: every tensor aligned, whatever order they come in."""
    return sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(path, name, repr(value)[:100], "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _corrupt(path, name, f"dtype {dtype!r}"[:100], f"one of {', '.join(ITEM_BYTES)}")
    if not _are_sizes(shape):
        raise _corrupt(path, name, f"shape {shape!r}"[:100], "a list of whole numbers >= 0")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(path, name, f"data_offsets {offsets!r}"[:100], "two whole numbers >= 0")
    entry = TensorEntry(name, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.num_bytes:
        got = f"{offsets[1] - offsets[0]:,} bytes"
        raise _corrupt(path, name, got, f"{entry.num_bytes:,} for {dtype} {list(entry.shape)}")
    return entry


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _corrupt(path: Path, tensor: str, got: str, expected: str) -> CheckpointError:
    place = f"{path.name}: {tensor}" if tensor else path.name
    return CheckpointError(f"corrupt safetensors file: {place}: got {got}, expected {expected}", f"fetch {path} again")
