from __future__ import annotations

from pathlib import Path

import pytest

from w4a4.configs.errors import CheckpointError
from w4a4.configs.json_file import MAX_JSON_BYTES, read_json_object


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [1, null]}')
    assert read_json_object(path) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "x.json: not JSON"),
        (b"{", "x.json: not JSON"),
        (b"\xff\xfe\x00", "x.json: not JSON"),
        (b"[" * 200_000, "x.json: not JSON"),
        (b"[]", "x.json: got list, expected a JSON object"),
        (b"null", "x.json: got NoneType, expected a JSON object"),
    ],
)
def test_everything_else_is_corrupt(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_json_object(tmp_path / "x.json")


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:  # sparse
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match="got 100,000,001 bytes, expected at most 100,000,000"):
        read_json_object(path)
