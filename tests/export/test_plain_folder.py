"""A plain folder is whole or not there, in shards of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.plain_folder import write_plain_folder


def test_shards_hold_every_tensor_once(written: Path, tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((10,), float(index)) for index in range(7)}
    folder = write_plain_folder(
        open_checkpoint(written), tmp_path / "out", {"a": 1}, [{name: tensor} for name, tensor in tensors.items()],
        "# card\n", max_shard_bytes=100,
    )  # fmt: skip
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert index["metadata"]["total_size"] == 280
    loaded = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert loaded.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}


def test_a_failure_leaves_nothing_behind(written: Path, tmp_path: Path) -> None:
    def parts() -> Iterator[dict[str, Tensor]]:
        yield {"first": torch.zeros(3)}
        raise RuntimeError("a tensor that cannot be made")

    with pytest.raises(RuntimeError):
        write_plain_folder(open_checkpoint(written), tmp_path / "out", {}, parts(), "")
    assert list(tmp_path.iterdir()) == []
