"""Files that are whole or not there: written beside their name, flushed to the disk, then renamed.

What the disk refuses becomes an error with something to do about it: full (exit 7), not writable (exit 2).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from w4a4.configs.errors import ResourceError, UsageError
from w4a4.configs.safetensors_header import TensorEntry, encode_header, in_file_order

PART_SUFFIX = ".part"
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.int64: "I64", torch.float64: "F64",
}  # fmt: skip
_CHUNK_BYTES = 1 << 24


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into ResourceError (full disk or quota) or UsageError (not writable)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            free = shutil.disk_usage(folder).free
            raise ResourceError(
                f"disk full while writing {path} ({free / 1e6:,.1f} MB free): {error.strerror}",
                "free some space and run the same command again: it resumes; or choose another disk with -o",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(
                f"cannot write {path}: {error.strerror}", "choose a folder you may write with -o"
            ) from error
        raise


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears as `path` when the block ends well, and leaves nothing behind otherwise."""
    part = path.with_name(path.name + PART_SUFFIX)
    with disk_errors(path):
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            fsync_folder(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    with durable_file(path) as file:
        file.write(data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, the same bytes for the same tensors in whatever order they come."""
    entries = in_file_order(entry_of(name, tensor) for name, tensor in tensors.items())
    with durable_file(path) as file:
        file.write(encode_header(entries))
        for entry in entries:
            flat = tensors[entry.name].detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name}: cannot store {tensor.dtype}")
    return TensorEntry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def copy_range(source: Path, start: int, num_bytes: int, target: BinaryIO) -> None:
    """Append bytes [start, start + num_bytes) of `source` to `target`."""
    with source.open("rb") as file:
        file.seek(start)
        while num_bytes:
            chunk = file.read(min(num_bytes, _CHUNK_BYTES))
            if not chunk:
                raise OSError(errno.EIO, f"{source} ended {num_bytes} bytes early")
            target.write(chunk)
            num_bytes -= len(chunk)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
