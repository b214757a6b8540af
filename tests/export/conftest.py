from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

from w4a4.export.checkpoint import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE
from w4a4.export.durable_file import write_tensors
from w4a4.export.manifest import SECTIONS, build_manifest, encode_json


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tiny_checkpoint beside this file."""
    spec = importlib.util.spec_from_file_location("tiny_checkpoint", Path(__file__).with_name("tiny_checkpoint.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def written(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint; do not change it."""
    output = tmp_path_factory.mktemp("written") / "tiny-w4a4"
    tiny.write(output)
    return output


class Breakable:
    """A checkpoint folder, and ways to break it that leave the rest of it consistent (hashes included)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_json(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / name).read_bytes())
        return value

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        (self.path / name).write_bytes(encode_json(value))

    def file_of(self, tensor: str) -> str:
        file: str = self.read_json(INDEX_FILE)["weight_map"][tensor]
        return file

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.path / self.file_of(name), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()

    def set_tensor(self, name: str, tensor: Tensor | None, near: str | None = None) -> None:
        """Replace, add (to the shard of the tensor `near`) or, with None, remove a tensor; index and hashes follow."""
        index = self.read_json(INDEX_FILE)
        file = index["weight_map"][near or name]
        with safe_open(self.path / file, framework="pt") as shard:
            tensors = {key: shard.get_tensor(key).clone() for key in shard.keys()}  # noqa: SIM118
        tensors.pop(name, None)
        index["weight_map"].pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
            index["weight_map"][name] = file
        write_tensors(self.path / file, tensors)
        self.write_json(INDEX_FILE, index)
        self.rehash()

    def set_quantization(self, section: str, key: str, value: Any) -> None:
        config = self.read_json(CONFIG_FILE)
        target = config["quantization_config"]
        (target[section] if section else target)[key] = value
        self.write_json(CONFIG_FILE, config)
        self.rehash()

    def rehash(self) -> None:
        manifest = self.read_json(MANIFEST_FILE)
        self.write_json(MANIFEST_FILE, build_manifest(self.path, {key: manifest[key] for key in SECTIONS}))


@pytest.fixture
def breakable(written: Path, tmp_path: Path) -> Breakable:
    path = tmp_path / "tiny-w4a4"
    shutil.copytree(written, path)
    return Breakable(path)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantized("qwen3", "dual", kv_mean=False)`: a tiny checkpoint that the pipeline wrote, made once."""
    path = Path(__file__).parents[1] / "serve" / "tiny_packed.py"
    spec = importlib.util.spec_from_file_location("tiny_packed", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str, recipe: str, **overrides: object) -> Path:
        key = (kind, recipe, *sorted(overrides.items()))
        if key not in made:
            made[key] = module.write_packed(tmp_path_factory.mktemp("quantized"), kind, recipe, **overrides)
        return made[key]

    return make
