"""A model folder in Hugging Face's layout: `config.json`, safetensors shards with their index, tokenizer files.

Folders come from strangers. Names in an index are base names only, links may not leave the folder (a hub snapshot's
may point into its own repository's cache), headers are bounded and checked against the file before a byte of weight is
read, and pickles are never opened.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from w4a4.calibrate.source import (
    SourceIdentity,
    SourceKind,
    check_source_config,
    check_tensor_names,
    checked_finite,
)
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import CheckpointError, NotFoundError, UnsupportedError
from w4a4.configs.json_file import read_json_object
from w4a4.configs.safetensors_header import TensorEntry, read_header
from w4a4.configs.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SIDE_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SIDE_NAMES: Final = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_MAX_SIDE_BYTES: Final = 64 * 2**20
_SAMPLE_BYTES: Final = 4096  # of each tensor, that the identity of a folder takes in


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    file: Path
    entry: TensorEntry


class SafetensorsSource:
    """See `calibrate.source.Source`."""

    def __init__(self, folder: Path, *, name: str, kind: SourceKind = "folder", revision: str | None = None) -> None:
        self._folder = folder
        self._name = name
        self._kind = kind
        self._revision = revision
        self._root = trusted_root(folder)
        self.hf_config: dict[str, Any] = read_config(folder, self._inside)
        self.config: ModelConfig = check_source_config(self.hf_config)
        self._tensors = _read_tensors(folder, self._inside)
        check_tensor_names(
            self.config, {tensor_name: entry.shape for tensor_name, (_, entry) in self._tensors.items()}, str(folder)
        )
        for tensor_name in self.config.tensor_shapes():
            file, entry = self._tensors[tensor_name]
            if entry.dtype not in FLOATS:
                raise CheckpointError(
                    f"{file.name}: tensor {tensor_name} has dtype {entry.dtype}, expected {', '.join(FLOATS)}",
                    "name the original model with float weights",
                )

    @cached_property
    def identity(self) -> SourceIdentity:
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for name, (path, entry) in sorted(self._tensors.items()):
            digest.update(name.encode())
            with path.open("rb", buffering=0) as file:
                end = entry.start + entry.num_bytes
                file.seek((entry.start + end) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, end - file.tell())))
        return SourceIdentity(self._name, self._kind, self._folder, self._revision, digest.hexdigest())

    @cached_property
    def side_files(self) -> tuple[Path, ...]:
        return tuple(
            sorted(
                self._inside(path)
                for path in self._folder.iterdir()
                if _is_side_file(path.name) and path.is_file() and path.stat().st_size <= _MAX_SIDE_BYTES
            )
        )

    def names(self) -> frozenset[str]:
        return frozenset(self.config.tensor_shapes())

    def tensor(self, name: str) -> Tensor:
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        stored = self._tensors.get(name)
        if stored is None or name not in self.names():
            raise CheckpointError(f"{self._folder}: the model has no tensor {name}")
        path, entry = stored
        raw = torch.empty(entry.shape, dtype=FLOATS[entry.dtype])
        with path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            _read_exactly(file.readinto, raw.reshape(-1).view(torch.uint8).numpy().data, path.name)
        return checked_finite(raw.to(torch.float32), name, path.name)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._folder, self.config.vocab_size)

    def _inside(self, path: Path) -> Path:
        """`path`, or CheckpointError when it is a link that leads out of what may be read."""
        resolved = path.resolve()
        if not resolved.is_relative_to(self._root):
            raise CheckpointError(
                f"{path.name} is a link to {resolved}, outside {self._root}", "replace the link by the file itself"
            )
        return path


def trusted_root(folder: Path) -> Path:
    """The folder that links in `folder` may point into: itself, or the repository's cache for a hub snapshot."""
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return resolved.parent.parent
    return resolved


def read_config(folder: Path, inside: Callable[[Path], Path]) -> dict[str, Any]:
    """`config.json` of `folder`. Raises NotFoundError or CheckpointError."""
    path = folder / "config.json"
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link that leads nowhere", "fetch the model again")
    if not path.is_file():
        raise NotFoundError(
            f"{folder} has no config.json: not a model in Hugging Face's layout",
            "name a folder with config.json and *.safetensors, a .gguf file, a hub id, or an alias (w4a4 models)",
        )
    return read_json_object(inside(path))


def _read_tensors(folder: Path, inside: Callable[[Path], Path]) -> dict[str, StoredTensor]:
    shards, weight_map = _shards(folder, inside)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        path = folder / shard
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: the shard {shard} that {INDEX} names is missing", "fetch the model again: it is incomplete"
            )
        for name, entry in read_header(inside(path)).items():
            if weight_map is not None and weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{shard}: tensor {name} is not listed for it in {INDEX}", "fetch the model again: files do not fit"
                )
            tensors[name] = StoredTensor(path, entry)
    for name, shard in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{shard}: tensor {name} is listed in {INDEX} but is not there")
    return tensors


def _shards(folder: Path, inside: Callable[[Path], Path]) -> tuple[list[str], Mapping[str, str] | None]:
    """(base names of the weight files, the index's map or None)."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json_object(inside(index)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{INDEX}: no weight_map")
        for name, shard in weight_map.items():
            if not _is_base_name(shard):
                raise CheckpointError(
                    f"{INDEX}: the file for {name} must be a plain *.safetensors name, got {shard!r}",
                    "do not use this model: an index may not point outside its folder",
                )
        return sorted(set(weight_map.values())), weight_map
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"], None
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(f"{folder}: {len(found)} safetensors files but no {INDEX}", "fetch the model again")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise UnsupportedError(
            f"{folder}: only pickled weights ({pickles[0]}), which can run code when opened and are never read",
            "convert it where you trust it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )
    raise NotFoundError(f"{folder}: no *.safetensors files", "fetch the model again: its weights are not there")


def _is_base_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not any(character in name for character in ("/", "\\", "\0", ":"))
        and name == os.path.basename(name)
        and not name.startswith(".")
    )


def _is_side_file(name: str) -> bool:
    if name in ("config.json", "README.md") or name.startswith(".") or name.endswith(".index.json"):
        return False
    return name.endswith(_SIDE_SUFFIXES) or name.split(".")[0] in _SIDE_NAMES


def _read_exactly(readinto: Callable[[memoryview], int | None], buffer: memoryview, name: str) -> None:
    done = 0
    while done < len(buffer):
        got = readinto(buffer[done:])
        if not got:
            raise CheckpointError(f"{name}: {len(buffer) - done:,} bytes are missing: the file was cut while in use")
        done += got
