"""The reader of a packed checkpoint, format 1: the only door by which the runtime sees what `export` wrote.

Opening checks everything that can be told without reading weights: config, format version, features, index, and every
header against the declared names, dtypes and shapes. Values (permutations, maps, scales) are checked as a linear is
read. No pickle is ever read; names in an index are base names; nothing outside the folder is followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from w4a4.configs.architecture import ModelConfig, quantization_method
from w4a4.configs.errors import CheckpointError, NotFoundError, W4A4Error
from w4a4.configs.json_file import read_json_object
from w4a4.configs.safetensors_header import TensorEntry, read_header
from w4a4.export.finding import Finding, raise_first
from w4a4.export.packed_linear import (
    FLOATS,
    SUFFIXES,
    PackedLinear,
    TensorSpec,
    WeightWidths,
    finite_findings,
    linear_specs,
    stored_layout,
    value_findings,
)
from w4a4.export.quantization_config import (
    FEATURES,
    FORMAT_VERSION,
    QUANT_METHOD,
    LayoutRules,
    read_quantization_config,
)
from w4a4.kernels.layout import LinearLayout

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "w4a4_manifest.json"
RECIPE_FILE = "recipe.yaml"
CARD_FILE = "README.md"
COPIED_BYTES = 1 << 20
"""A view of a mapped file keeps all of it mapped: up to this size tensors are copied, so that a model that runs on
converted weights does not hold its shards for a norm and some scales."""

__all__ = [
    "CARD_FILE", "CONFIG_FILE", "FEATURES", "FORMAT_VERSION", "INDEX_FILE", "MANIFEST_FILE", "RECIPE_FILE",
    "PackedCheckpoint", "PackedLinear", "is_packed", "open_checkpoint",
]  # fmt: skip


@dataclass(frozen=True)
class PackedCheckpoint:
    """An opened checkpoint. Tensors are read on demand (memory-mapped; small ones copied) and returned on the CPU.

    `entries` has every tensor's dtype, shape and place; `files` the shard each one stands in.
    """

    path: Path
    config: ModelConfig
    hf_config: dict[str, Any]
    quantization: dict[str, Any]
    entries: Mapping[str, TensorEntry]
    files: Mapping[str, str]
    _handles: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rules(self) -> LayoutRules:
        return LayoutRules.of(self.quantization)

    @property
    def linear_names(self) -> list[str]:
        """Prefixes of the packed linears, in order of use: "model.layers.0.self_attn.q_proj", ..."""
        names = list(self.config.linear_shapes())
        return [f"model.layers.{layer}.{name}" for layer in range(self.config.num_layers) for name in names]

    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        return frozenset(self.entries)

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored.

        Raises:
            CheckpointError: there is none of that name.
            NumericsError: it belongs to no packed linear (a norm, an embedding, a mean) and holds NaN or infinity.
        """
        tensor = self.stored(name)
        if name.rpartition(".")[2] not in SUFFIXES:
            raise_first(finite_findings(name, tensor, self.files[name]))
        return tensor

    def stored(self, name: str) -> Tensor:
        """One tensor as `tensor` gives it, its values not checked."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: no tensor {name!r}", "`w4a4 inspect DIR` lists what there is")
        file = self.files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(shard_path(self.path, file), framework="pt")
        tensor: Tensor = self._handles[file].get_tensor(name)
        return tensor.clone() if tensor.nbytes <= COPIED_BYTES else tensor

    def linear_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The stored tensors of the linear `prefix`, by suffix ("weight_packed", ...), values not checked."""
        self._check_linear(prefix)
        names = {suffix: f"{prefix}.{suffix}" for suffix in SUFFIXES}
        return {suffix: self.tensor(name) for suffix, name in names.items() if name in self.entries}

    def linear(self, prefix: str) -> PackedLinear:
        """The linear `prefix` with its values checked. Raises CheckpointError, or NumericsError for NaN or infinity."""
        return PackedLinear.from_tensors(prefix, self.linear_tensors(prefix), self.rules, self._file_of(prefix))

    def layout(self, prefix: str) -> LinearLayout:
        """The layout of the linear `prefix`, without reading its weights. Raises CheckpointError."""
        self._check_linear(prefix)
        shapes = _shapes_of(self.entries, prefix)
        block_precision, act_clip = (self.tensor(f"{prefix}.{suffix}") for suffix in ("block_precision", "act_clip"))
        return stored_layout(prefix, shapes, block_precision, act_clip, self.rules, self._file_of(prefix))

    def linear_findings(self, prefix: str) -> list[Finding]:
        """Everything wrong with the values of the linear `prefix`; empty where there is nothing."""
        file = self._file_of(prefix)
        findings = value_findings(prefix, self.linear_tensors(prefix), file)
        if not findings:
            try:
                self.layout(prefix)
            except CheckpointError as error:
                findings = [Finding(file, prefix, "segments, map and scales that fit together", error.message)]
        return findings

    def _check_linear(self, prefix: str) -> None:
        if f"{prefix}.weight_shape" not in self.entries:
            raise CheckpointError(f"{self.path}: no packed linear {prefix!r}", "`w4a4 inspect DIR` lists what there is")

    def _file_of(self, prefix: str) -> str:
        return self.files.get(f"{prefix}.weight_shape", "")


def open_checkpoint(path: Path) -> PackedCheckpoint:
    """Open the folder `path`.

    Raises:
        NotFoundError: no such folder.
        UnsupportedError: not a w4a4 checkpoint, a newer major format, an unknown required feature or architecture.
        CheckpointError: anything corrupt or untrusted in config, index or headers.
    """
    hf_config = read_config(path)
    quantization = read_quantization_config(hf_config)
    index = read_index(path)
    config = model_config(hf_config, index)
    entries: dict[str, TensorEntry] = {}
    for file in sorted(set(index.values())):
        header = read_header(shard_path(path, file))
        raise_first(index_findings(index, file, header))
        entries.update(header)
    raise_first(structure_findings(config, quantization, entries, index))
    return PackedCheckpoint(path, config, hf_config, quantization, entries, index)


def is_packed(path: Path) -> bool:
    """Whether `path` is a checkpoint of ours, sound or damaged, which `open_checkpoint` would tell.

    Our manifest says so, or else config.json. A folder that says neither may be a source model.
    """
    if not path.is_dir():
        return False
    if os.path.lexists(path / MANIFEST_FILE):
        return True
    try:
        return quantization_method(read_config(path)) == QUANT_METHOD
    except W4A4Error:
        return False


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        NotFoundError: no such folder, or one without config.json and manifest, which is no checkpoint.
        CheckpointError: config.json is missing from a checkpoint, leads out of it, or is no JSON object.
    """
    hint = "make one with `w4a4 quantize MODEL -o DIR`"
    if not path.is_dir():
        raise NotFoundError(f"no checkpoint folder at {path}", hint)
    if not any(os.path.lexists(path / file) for file in (CONFIG_FILE, MANIFEST_FILE)):
        raise NotFoundError(f"{path} is no checkpoint folder: it has no {CONFIG_FILE}", hint)
    return read_json_object(shard_path(path, CONFIG_FILE))


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> base name of its shard, from the index. Raises CheckpointError."""
    if not (path / INDEX_FILE).exists() and any(path.glob("*.bin")):
        raise CheckpointError(
            f"{path}: has pickled weights (*.bin) and no {INDEX_FILE}; expected safetensors",
            "pickles are never read: make a checkpoint with `w4a4 quantize MODEL -o DIR`",
        )
    weight_map = read_json_object(shard_path(path, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_FILE}: weight_map: got {str(weight_map)[:60]}, expected tensor names to files")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _is_base_name(file) or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEX_FILE}: {tensor}: got file {file!r}, expected the base name of a .safetensors file",
                "the checkpoint is not to be trusted: fetch it again from its source",
            )
    return weight_map


def model_config(hf_config: Mapping[str, Any], index: Mapping[str, str]) -> ModelConfig:
    """The shape that config.json declares, refused where its layers could not be in the index (and would cost memory).

    Raises UnsupportedError for an architecture, CheckpointError for anything else.
    """
    num_layers = hf_config.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > len(index):
        raise CheckpointError(
            f"{CONFIG_FILE}: num_hidden_layers: got {num_layers}, expected at most the {len(index)} tensors there are",
            "fetch or write the checkpoint again",
        )
    return ModelConfig.from_hf(hf_config)


def shard_path(folder: Path, file: str) -> Path:
    """The path of a shard, checked to be a regular file inside `folder`.

    A hub cache keeps files as links into the `blobs` beside its `snapshots`; those are followed, no others.
    """
    path = folder / file
    if not path.exists():
        what = "a link that leads nowhere" if path.is_symlink() else "missing"
        raise CheckpointError(f"{file}: {what}, expected a file in {folder}", "fetch or write the checkpoint again")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if path.resolve().parent not in allowed or not path.is_file():
        got = f"a link to {path.resolve()}" if path.is_symlink() else "no regular file"
        raise CheckpointError(
            f"{file}: got {got}, expected a regular file inside {folder}",
            "the checkpoint is not to be trusted: fetch it again from its source",
        )
    return path


def declared_tensors(config: ModelConfig, quantization: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this model holds: packed linears by suffix, the rest as in the source."""
    specs: dict[str, TensorSpec] = {}
    packed = [f"{layer}.{name}" for layer in range(config.num_layers) for name in config.linear_shapes()]
    inner = {f"model.layers.{name}.{suffix}" for name in packed for suffix in ("weight", "bias")}
    for name, shape in config.tensor_shapes().items():
        if name not in inner:
            specs[name] = TensorSpec(FLOATS, shape)
    for layer in range(config.num_layers):
        for name, (out_features, in_features) in config.linear_shapes().items():
            for suffix, spec in linear_specs(out_features, in_features, config.has_bias(name)).items():
                specs[f"model.layers.{layer}.{name}.{suffix}"] = spec
        if quantization["kv_cache"]["k_mean"]:
            name = f"model.layers.{layer}.self_attn.k_mean"
            specs[name] = TensorSpec(("F32",), (config.num_kv_heads, config.head_dim))
    return specs


def structure_findings(
    config: ModelConfig,
    quantization: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    files: Mapping[str, str],
) -> Iterator[Finding]:
    """What is wrong with names, dtypes and shapes, told from headers alone."""
    specs = declared_tensors(config, quantization)
    for name in sorted(set(entries) - set(specs)):
        yield Finding(files.get(name, ""), name, "no such tensor in this model", "an extra tensor")
    for name, spec in specs.items():
        entry = entries.get(name)
        if entry is None:
            if spec.is_required:
                yield Finding("", name, "the tensor", "a missing tensor")
            continue
        if entry.dtype not in spec.dtypes:
            yield Finding(files[name], name, f"dtype {' or '.join(spec.dtypes)}", entry.dtype)
        if not _fits(entry.shape, spec.shape):
            sizes = ", ".join("any" if size is None else str(size) for size in spec.shape)
            yield Finding(files[name], name, f"shape [{sizes}]", str(list(entry.shape)))
    for layer in range(config.num_layers):
        for name, (_, in_features) in config.linear_shapes().items():
            yield from _linear_structure(f"model.layers.{layer}.{name}", in_features, entries, files)
    down_hadamard = quantization["transforms"]["down_hadamard"]
    if config.intermediate_size % down_hadamard:
        expected = f"a block that divides {config.intermediate_size}"
        yield Finding(CONFIG_FILE, "quantization_config.transforms.down_hadamard", expected, str(down_hadamard))


def index_findings(index: Mapping[str, str], file: str, header: Mapping[str, TensorEntry]) -> Iterator[Finding]:
    """Where a shard and the index disagree about which tensors the shard holds."""
    named = {tensor for tensor, shard in index.items() if shard == file}
    for name in sorted(named - set(header)):
        yield Finding(file, name, "the tensor, as the index says", "a missing tensor")
    for name in sorted(set(header) - named):
        yield Finding(file, name, f"no tensor that {INDEX_FILE} does not place here", "an extra tensor")


def _linear_structure(
    prefix: str, in_features: int, entries: Mapping[str, TensorEntry], files: Mapping[str, str]
) -> Iterator[Finding]:
    shapes = _shapes_of(entries, prefix)
    file = files.get(f"{prefix}.weight_shape", "")
    if any(len(shapes[suffix]) != 2 for suffix in ("weight_packed", "weight_int8", "weight_outlier", "weight_scale")
           if suffix in shapes):  # fmt: skip
        return  # already found
    widths = WeightWidths.of_shapes(shapes)
    if widths.total != in_features:
        yield Finding(file, prefix, f"{in_features} stored weight columns", f"{widths.total}")
    has_integers = widths.int4 + widths.int8 > 0
    if has_integers != ("weight_scale" in shapes):
        expected = "the tensor" if has_integers else "none, as there are no integer weights"
        yield Finding(file, f"{prefix}.weight_scale", expected, "none" if has_integers else "a tensor")
    blocks = shapes.get("block_precision", (1,))
    if len(blocks) == 1 and (not blocks[0] or in_features % blocks[0]):
        expected = f"a number of blocks that divides {in_features}"
        yield Finding(file, f"{prefix}.block_precision", expected, f"{blocks[0]} blocks")


def _shapes_of(entries: Mapping[str, TensorEntry], prefix: str) -> dict[str, tuple[int, ...]]:
    names = {suffix: f"{prefix}.{suffix}" for suffix in SUFFIXES}
    return {suffix: entries[name].shape for suffix, name in names.items() if name in entries}


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(
        want is None or want == size for size, want in zip(shape, declared, strict=True)
    )


def _is_base_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")
