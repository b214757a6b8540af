from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from w4a4.configs.errors import CheckpointError
from w4a4.configs.safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES, read_header
from w4a4.export.durable_file import write_tensors

TENSORS = {
    "b": torch.arange(6, dtype=torch.int32).reshape(2, 3),
    "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "flags": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def file_with(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str, shape: Any, *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_what_we_write_the_library_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours.safetensors", TENSORS)
    read = load_file(tmp_path / "ours.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and read[name].equal(tensor)


def test_bytes_do_not_depend_on_the_order_of_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "one.safetensors", TENSORS)
    write_tensors(tmp_path / "two.safetensors", dict(reversed(TENSORS.items())))
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    for found in read_header(tmp_path / "one.safetensors").values():
        assert found.start % ITEM_BYTES[found.dtype] == 0


def test_files_of_the_library_pass(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    write_tensors(tmp_path / "ours.safetensors", TENSORS)
    theirs, ours = read_header(tmp_path / "theirs.safetensors"), read_header(tmp_path / "ours.safetensors")
    shapes = [{name: (e.dtype, e.shape) for name, e in header.items()} for header in (theirs, ours)]
    assert shapes[0] == shapes[1]


def test_entries_point_at_the_bytes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t.safetensors", TENSORS)
    found = read_header(tmp_path / "t.safetensors")["b"]
    raw = (tmp_path / "t.safetensors").read_bytes()[found.start : found.start + found.num_bytes]
    assert found.dtype == "I32" and found.shape == (2, 3) and raw == struct.pack("<6i", *range(6))


def test_header_over_100_mb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:  # sparse: the file is as long as it says
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="header of 100,000,001 bytes, expected at most 100,000,000"):
        read_header(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 20, -1])
def test_truncated_anywhere(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="t.safetensors"):
        read_header(path)


def test_a_tail_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="has a tail"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"\xff\xfe", b"", "not JSON"),
        (b"[" * 200_000, b"", "not JSON"),
        ([], b"", "of type list"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}', b"x", "stands twice"),
        ({"a": {"dtype": "U8"}}, b"", "expected an object with dtype, shape and data_offsets"),
        ({"a": entry("Q4", [1], 0, 1)}, b"x", "dtype 'Q4'"),
        ({"a": entry("U8", [-1], 0, 1)}, b"x", "whole numbers >= 0"),
        ({"a": entry("U8", [True], 0, 1)}, b"x", "whole numbers >= 0"),
        ({"a": entry("U8", [1], -1, 0)}, b"x", "whole numbers >= 0"),
        ({"a": entry("U8", [2**62, 2**62], 0, 1)}, b"x", "got 1 bytes"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xyz", "no overlap"),
        ({"a": entry("U8", [1], 1, 2)}, b"xy", "no gap"),
        ({"a": entry("U8", [4], 0, 4)}, b"xy", "truncated or has a tail"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(file_with(tmp_path / "bad.safetensors", header, data))
