"""The front of a GGUF file: metadata and the table of tensors, checked against the file before anything is read.

Written out here instead of going through the `gguf` package's reader because that one maps every string of a vocabulary
into its own array (seconds for 150,000 tokens) and trusts lengths and offsets. Format: the GGUF specification of the
ggml project, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from w4a4.configs.errors import CheckpointError, UnsupportedError

MAX_HEADER_BYTES: Final = 100_000_000
_MAX_DIMENSIONS: Final = 4

# Type codes of metadata values: fixed-size numbers by struct format, then string and array.
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor. `shape` is in PyTorch's order; `begin` counts bytes from the start of `file`."""

    file: Path
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension), whole quantisation blocks."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(self.shape[-1] // block * block_bytes)


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Metadata and tensor table of the GGUF file at `path`.

    Raises:
        CheckpointError: not a GGUF file, truncated, a header over 100 MB, or entries that do not fit the file.
        UnsupportedError: another version of the format, or a tensor type that is not known.
    """
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path.name} is truncated: {size} bytes", "fetch the file again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        if view[:4] != b"GGUF":
            raise CheckpointError(f"{path.name} is not a GGUF file: it begins with {view[:4]!r}")
        cursor = _Cursor(view, path.name)
        try:
            return _parse(cursor, path, size)
        except struct.error as error:
            raise CheckpointError(f"{path.name} is truncated within its header", "fetch the file again") from error


class _Cursor:
    """Reads forward through the mapped header and never beyond its limit."""

    def __init__(self, view: mmap.mmap, name: str) -> None:
        self.view = view
        self.name = name
        self.position = 4

    def advance(self, num_bytes: int) -> int:
        """Move over `num_bytes` and return where they begin."""
        begin = self.position
        self.position += num_bytes
        if self.position > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.name}: the header is larger than {MAX_HEADER_BYTES:,} bytes")
        if self.position > len(self.view):
            raise CheckpointError(f"{self.name} is truncated within its header", "fetch the file again")
        return begin

    def number(self, code: str) -> Any:
        fmt = f"<{code}"
        return struct.unpack_from(fmt, self.view, self.advance(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        length = self.number("Q")
        begin = self.advance(length)
        return self.view[begin : begin + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element in _NUMBERS:
                fmt = f"<{count}{_NUMBERS[element]}" if count <= MAX_HEADER_BYTES else None
                if fmt is None:
                    raise CheckpointError(f"{self.name}: an array of {count:,} values in the header")
                return list(struct.unpack_from(fmt, self.view, self.advance(struct.calcsize(fmt))))
            return [self.value(element) for _ in range(min(count, MAX_HEADER_BYTES))]
        raise CheckpointError(f"{self.name}: metadata of unknown type {kind}")


def _parse(cursor: _Cursor, path: Path, size: int) -> GGUFHeader:
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedError(f"{path.name}: GGUF version {version}, supported: 2 and 3 (little endian)")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(min(num_values, MAX_HEADER_BYTES)):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(min(num_tensors, MAX_HEADER_BYTES))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{path.name}: general.alignment must be positive, got {alignment!r}")
    data_begin = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, code, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path.name}: tensor {name} is there twice")
        tensors[name] = _tensor(path, name, shape, code, data_begin + offset, size)
    return GGUFHeader(metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.number("I")
    if not 0 < num_dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.name}: tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(path: Path, name: str, shape: tuple[int, ...], code: int, begin: int, size: int) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as error:
        raise UnsupportedError(f"{path.name}: tensor {name} has an unknown type, number {code}") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(f"{path.name}: tensor {name} {list(shape)} does not divide into {kind.name} blocks")
    count = 1
    for dimension in shape:
        count *= dimension
    num_bytes = count // block * block_bytes
    if begin + num_bytes > size:
        raise CheckpointError(
            f"{path.name} is truncated: {size:,} bytes, tensor {name} ends at {begin + num_bytes:,}",
            "fetch the file again",
        )
    return GGUFTensor(path, shape, kind, begin, num_bytes)
