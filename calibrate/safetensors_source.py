"""A model folder in Hugging Face's layout: `config.json`, safetensors shards with their index, tokenizer files.

Folders come from strangers. Names in an index are base names only, links may not leave the folder (a hub snapshot's
may point into its own repository's cache), headers are bounded and checked against the file before a byte of weight is
read, and pickles are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from w4a4.calibrate.source import (
    SourceIdentity,
    SourceKind,
    check_source_config,
    check_tensor_names,
    checked_finite,
    load_tokenizer,
)
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import CheckpointError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_HEADER_BYTES: Final = 100_000_000
INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SIDE_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SIDE_NAMES: Final = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_MAX_SIDE_BYTES: Final = 64 * 2**20
_SAMPLE_BYTES: Final = 4096  # of each tensor, that the identity of a folder takes in


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `begin` and `end` are byte offsets in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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
            self.config, {tensor_name: stored.shape for tensor_name, stored in self._tensors.items()}, str(folder)
        )
        for tensor_name in self.config.tensor_shapes():
            stored = self._tensors[tensor_name]
            if stored.dtype not in FLOATS:
                raise CheckpointError(
                    f"{stored.file.name}: tensor {tensor_name} has dtype {stored.dtype}, expected {', '.join(FLOATS)}",
                    "name the original model with float weights",
                )

    @cached_property
    def identity(self) -> SourceIdentity:
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for name, stored in sorted(self._tensors.items()):
            digest.update(name.encode())
            with stored.file.open("rb", buffering=0) as file:
                file.seek((stored.begin + stored.end) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, stored.end - file.tell())))
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
        raw = torch.empty(stored.shape, dtype=FLOATS[stored.dtype])
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.begin)
            _read_exactly(file.readinto, raw.reshape(-1).view(torch.uint8).numpy().data, stored.file.name)
        return checked_finite(raw.to(torch.float32), name, stored.file.name)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._folder)

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
    if not path.is_file():
        raise NotFoundError(
            f"{folder} has no config.json: not a model in Hugging Face's layout",
            "name a folder with config.json and *.safetensors, a .gguf file, a hub id, or an alias (w4a4 models)",
        )
    return _read_json(inside(path))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file declares, checked against its true size.

    Format: u64 length N, N bytes of JSON, data; offsets in the JSON count from the end of it.

    Raises:
        CheckpointError: truncated, a header over 100 MB, or entries that contradict each other or the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _truncated(path, size, 8)
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path.name}: header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are accepted")
        if 8 + length > size:
            raise _truncated(path, size, 8 + length)
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path.name}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: the header must be a mapping, got {type(header).__name__}")
    tensors = {
        name: _stored(path, str(name), entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
    }
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin < end:
            raise CheckpointError(f"{path.name}: tensor {name} overlaps another one")
        end = stored.end
    if end > size:
        raise _truncated(path, size, end)
    return tensors


def _stored(path: Path, name: str, entry: Any, data_begin: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError("negative or fractional number")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name}: the header's entry for {name} makes no sense: {error}") from error
    if dtype in FLOATS and math.prod(shape) * FLOATS[dtype].itemsize != end - begin:
        raise CheckpointError(
            f"{path.name}: tensor {name} is {dtype} {list(shape)} but has {end - begin:,} bytes, "
            f"expected {math.prod(shape) * FLOATS[dtype].itemsize:,}"
        )
    return StoredTensor(path, str(dtype), shape, data_begin + begin, data_begin + end)


def _read_tensors(folder: Path, inside: Callable[[Path], Path]) -> dict[str, StoredTensor]:
    shards, weight_map = _shards(folder, inside)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        path = folder / shard
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: the shard {shard} that {INDEX} names is missing", "fetch the model again: it is incomplete"
            )
        for name, stored in read_header(inside(path)).items():
            if weight_map is not None and weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{shard}: tensor {name} is not listed for it in {INDEX}", "fetch the model again: files do not fit"
                )
            tensors[name] = stored
    for name, shard in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{shard}: tensor {name} is listed in {INDEX} but is not there")
    return tensors


def _shards(folder: Path, inside: Callable[[Path], Path]) -> tuple[list[str], Mapping[str, str] | None]:
    """(base names of the weight files, the index's map or None)."""
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_json(inside(index)).get("weight_map")
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


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path.name}: {path.stat().st_size:,} bytes, at most {MAX_HEADER_BYTES:,} are accepted")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a mapping, got {type(value).__name__}")
    return value


def _read_exactly(readinto: Callable[[memoryview], int | None], buffer: memoryview, name: str) -> None:
    done = 0
    while done < len(buffer):
        got = readinto(buffer[done:])
        if not got:
            raise CheckpointError(f"{name}: {len(buffer) - done:,} bytes are missing: the file was cut while in use")
        done += got


def _truncated(path: Path, size: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is truncated: {size:,} bytes, its header asks for {needed:,}", "fetch the file again"
    )
