"""The writer of a packed checkpoint: layer by layer into a work folder, and the whole output by one rename at the end.

The work folder `.<name>.w4a4-work` stands next to the output and holds

    lock                            one job at a time
    run.json                        which run this is; another run never continues it
    progress.json                   what is done; its rename is the commit point of every step
    layer-00012.safetensors         a packed layer
    state-<name>-00013.safetensors  what the run carries from 13 finished layers into the next
    rest.safetensors                embeddings, final norm, lm_head
    plan.json                       which tensor goes to which shard, once all are there
    checkpoint/                     the output as it grows; renamed to the output when complete

When all is done the folder is renamed to `.<name>.w4a4-garbage` and removed.
Kill the process anywhere and open the folder again: files that progress.json does not name are removed, and the run
continues behind the last commit. A layer's file goes away as soon as all of it stands in a durable shard, so the
disk never holds much more than the checkpoint and one shard.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from w4a4.configs.errors import UsageError
from w4a4.configs.safetensors_header import TensorEntry, encode_header, in_file_order, read_header
from w4a4.export.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    RECIPE_FILE,
    open_checkpoint,
)
from w4a4.export.durable_file import copy_range, disk_errors, durable_file, fsync_folder, write_bytes, write_tensors
from w4a4.export.manifest import build_manifest, encode_json
from w4a4.export.output_lock import OutputLock
from w4a4.export.packed_linear import SUFFIXES, PackedLinear
from w4a4.export.quantization_config import LayoutRules, read_quantization_config, required_features

MAX_SHARD_BYTES = 5_000_000_000
_OWN_FILES = {CARD_FILE, CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, RECIPE_FILE}
_REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".safetensors", ".gguf")
_SHARING_INPUT = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


@dataclass
class _Progress:
    """progress.json. `rules` is None until a layer is written; `states` are those saved with the last layer."""

    num_layers: int = 0
    states: list[str] = field(default_factory=list)
    is_rest_done: bool = False
    rules: dict[str, Any] | None = None


class CheckpointWriter:
    """Writes one checkpoint folder. Use it as a context manager: leaving it gives up the lock and keeps the work.

    Args:
        output: the folder to make; it must not exist (an empty folder may).
        identity_of_run: everything that decides the result (source, revision, recipe, data, seed, version), as
            JSON values. Only a run with the same identity resumes.
        source: the folder or file read from, which the output must not be.
    """

    def __init__(self, output: Path, identity_of_run: Mapping[str, Any], source: Path | None = None) -> None:
        self.output = Path(os.path.abspath(output))
        self.work = self.output.parent / f".{self.output.name}.w4a4-work"
        self._garbage = self.output.parent / f".{self.output.name}.w4a4-garbage"
        self._identity = json.loads(json.dumps(identity_of_run, sort_keys=True))
        self._source = source
        self._lock = OutputLock(self.work / "lock")
        self._progress = _Progress()
        self._staged: list[str] = []
        self._assembled: dict[str, Any] | None = None

    def open(self) -> int:
        """Lock the output and return the number of finished layers (0: a fresh start).

        Raises:
            UsageError: the output exists or is the source, cannot be written, another job is at it, or the work
                folder belongs to a different run.
            ResourceError: the disk is full.
        """
        shutil.rmtree(self._garbage, ignore_errors=True)
        if self._source is not None and self._source.exists() and self._source.resolve() == self.output.resolve():
            raise UsageError(f"the output {self.output} is the source itself", "choose another folder with -o")
        if not self._is_output_free():
            self._remove_published_work()
            raise UsageError(
                f"the output {self.output} exists",
                "choose another folder with -o, or remove it first",
            )
        with disk_errors(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            self._check_identity()
            self._load_progress()
        except BaseException:
            self._lock.release()
            raise
        return self._progress.num_layers

    def close(self) -> None:
        """Give up the lock and keep the work folder: the same command resumes."""
        self._lock.release()

    def abandon(self) -> None:
        """Remove the work folder and give up the lock. The output is not touched."""
        # Renamed first: a kill while it is removed leaves a folder that is garbage by its name.
        with disk_errors(self.work):
            os.rename(self.work, self._garbage)
            shutil.rmtree(self._garbage)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_layers_done(self) -> int:
        return self._progress.num_layers

    @property
    def is_rest_done(self) -> bool:
        return self._progress.is_rest_done

    def save_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Stage what the next layer needs, before `write_layer` of the current one, whose commit covers both.

        States belong to a number of finished layers: each layer saves all of its own again.
        """
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ValueError(f"a state's name has letters, digits and underscores, got {name!r}")
        write_tensors(self._state_path(name, self._progress.num_layers + 1), tensors)
        self._staged.append(name)

    def load_state(self, name: str) -> dict[str, Tensor] | None:
        """The state committed with the last finished layer; None where none of that name was."""
        if name not in self._progress.states:
            return None
        return _read_tensors(self._state_path(name, self._progress.num_layers))

    def write_layer(self, index: int, linears: Mapping[str, PackedLinear], tensors: Mapping[str, Tensor]) -> None:
        """Commit layer `index` with the states staged for it.

        Args:
            linears: by full prefix, "model.layers.3.mlp.up_proj".
            tensors: norms and other unquantised tensors of the layer, by full name.
        Raises:
            ValueError: not the next layer, a name outside it, or layouts the format cannot hold.
            NumericsError: scales or other values that are not finite.
            ResourceError: the disk is full; everything committed stays.
        """
        if index != self._progress.num_layers:
            raise ValueError(f"layer {self._progress.num_layers} is next, got layer {index}")
        prefix = f"model.layers.{index}."
        outside = [name for name in (*linears, *tensors) if not name.startswith(prefix)]
        if outside:
            raise ValueError(f"{outside[0]} is not a tensor of layer {index}")
        _check_shared_inputs(prefix, linears)
        rules = _merge_rules(self._progress.rules, linears)
        stored = dict(tensors)
        for name, linear in linears.items():
            stored |= linear.to_tensors(name)
        write_tensors(self._layer_path(index), stored)
        old = [self._state_path(name, index) for name in self._progress.states]
        self._commit(_Progress(index + 1, sorted(set(self._staged)), self._progress.is_rest_done, rules))
        self._staged = []
        for path in old:
            path.unlink(missing_ok=True)

    def read_layer(self, index: int) -> tuple[dict[str, PackedLinear], dict[str, Tensor]]:
        """A committed layer: its linears by prefix and its other tensors by name, as given to `write_layer`."""
        if index >= self._progress.num_layers or self._progress.rules is None:
            raise ValueError(f"{self._progress.num_layers} layers are written, got layer {index}")
        prefix = f"model.layers.{index}."
        tensors: dict[str, Tensor] = {}
        for name, (path, _) in self._stored().items():
            if name.startswith(prefix):
                with safe_open(path, framework="pt") as file:
                    tensors[name] = file.get_tensor(name)
        rules = LayoutRules(**{key: value for key, value in self._progress.rules.items() if value is not None})
        linears = {}
        for name in [name.removesuffix(".weight_shape") for name in tensors if name.endswith(".weight_shape")]:
            parts = {s: tensors.pop(f"{name}.{s}") for s in SUFFIXES if f"{name}.{s}" in tensors}
            linears[name] = PackedLinear.from_tensors(name, parts, rules, self._layer_path(index).name)
        return linears, tensors

    def write_rest(self, tensors: Mapping[str, Tensor]) -> None:
        """Commit embeddings, final norm and lm_head. A second call in a resumed run changes nothing."""
        if self._progress.is_rest_done:
            return
        write_tensors(self.work / "rest.safetensors", tensors)
        progress = self._progress
        self._commit(_Progress(progress.num_layers, progress.states, True, progress.rules))

    def assemble(
        self,
        config: Mapping[str, Any],
        quantization: Mapping[str, Any],
        recipe_yaml: str,
        side_files: Sequence[Path],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> Path:
        """Make the checkpoint inside the work folder, check that the reader opens it, and return its path.

        It lacks only model card and manifest, so what is measured on it is measured on the files that are published.

        Args:
            config: the source's config.json; `quantization_config` is put in.
            quantization: the complete quantization_config; `required_features` is filled in here.
            side_files: tokenizer and other files to copy by base name; the names this format uses itself are skipped.
        """
        if not self._progress.is_rest_done:
            raise ValueError("write_rest comes before assemble")
        folder = self.work / "checkpoint"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        weight_map, total_bytes = self._assemble_shards(folder, max_shard_bytes)
        for left_over in {entry.name for entry in folder.iterdir()} - set(weight_map.values()):
            (folder / left_over).unlink()
        features = required_features(quantization, set(weight_map))
        hf_config = {key: value for key, value in config.items() if key != "quantization_config"}
        hf_config["quantization_config"] = {**quantization, "required_features": features}
        self._check_rules(LayoutRules.of(read_quantization_config(hf_config)))
        for path in side_files:
            if path.name.lower().endswith(_REFUSED_SUFFIXES):
                raise UsageError(f"{path} holds weights and is no side file", "leave it out of the source folder")
            if path.name not in _OWN_FILES:
                write_bytes(folder / path.name, path.read_bytes())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_bytes(folder / INDEX_FILE, encode_json(index))
        write_bytes(folder / RECIPE_FILE, recipe_yaml.encode())
        write_bytes(folder / CONFIG_FILE, encode_json(hf_config))
        open_checkpoint(folder)
        self._assembled = hf_config
        return folder

    def publish(self, manifest_extras: Mapping[str, Any], model_card: str) -> Path:
        """Add model card and manifest, rename the folder to the output, remove the work folder. Returns the output.

        Raises:
            UsageError: the output appeared meanwhile; the work stays and another -o cannot lose it.
        """
        if self._assembled is None:
            raise ValueError("assemble comes before publish")
        folder = self.work / "checkpoint"
        write_bytes(folder / CARD_FILE, model_card.encode())
        write_bytes(folder / MANIFEST_FILE, encode_json(build_manifest(folder, manifest_extras)))
        if not self._is_output_free():
            raise UsageError(
                f"the output {self.output} appeared during the run; the finished checkpoint stays in {folder}",
                "move the other one away and run the same command again",
            )
        with disk_errors(self.output):
            os.rename(folder, self.output)
            fsync_folder(self.output.parent)
        self.abandon()
        return self.output

    def finish(
        self,
        config: Mapping[str, Any],
        quantization: Mapping[str, Any],
        recipe_yaml: str,
        side_files: Sequence[Path],
        manifest_extras: Mapping[str, Any],
        model_card: str,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> Path:
        """`assemble`, then `publish`, for a run that measures nothing in between."""
        self.assemble(config, quantization, recipe_yaml, side_files, max_shard_bytes)
        return self.publish(manifest_extras, model_card)

    def _is_output_free(self) -> bool:
        if self.output.is_symlink() or not self.output.exists():
            return not self.output.is_symlink()
        return self.output.is_dir() and not any(self.output.iterdir())

    def _remove_published_work(self) -> None:
        """Clean up after a kill between the rename of the output and the removal of the work folder."""
        if (self.output / MANIFEST_FILE).exists() and (self.work / "plan.json").exists():
            self._lock.acquire()
            if self._is_same_run() and not (self.work / "checkpoint").exists():
                self.abandon()
            self._lock.release()

    def _is_same_run(self) -> bool:
        path = self.work / "run.json"
        return path.exists() and json.loads(path.read_bytes()) == self._identity

    def _check_identity(self) -> None:
        path = self.work / "run.json"
        if not path.exists():
            write_bytes(path, encode_json(self._identity))
        elif not self._is_same_run():
            before = json.loads(path.read_bytes())
            keys = sorted(
                key for key in before.keys() | self._identity.keys() if before.get(key) != self._identity.get(key)
            )
            raise UsageError(
                f"{self.work} holds the work of a different run for this output (different: {', '.join(keys)})",
                f"choose another output with -o, or drop that work: rm -r '{self.work}'",
            )

    def _load_progress(self) -> None:
        path = self.work / "progress.json"
        self._progress = _Progress(**json.loads(path.read_bytes())) if path.exists() else _Progress()
        self._staged = []
        progress = self._progress
        kept = {"lock", "run.json", "progress.json", "plan.json", "checkpoint"}
        kept |= {self._layer_path(layer).name for layer in range(progress.num_layers)}
        kept |= {self._state_path(name, progress.num_layers).name for name in progress.states}
        kept |= {"rest.safetensors"} if progress.is_rest_done else set()
        for entry in self.work.iterdir():
            if entry.name not in kept:
                entry.unlink()

    def _commit(self, progress: _Progress) -> None:
        write_bytes(self.work / "progress.json", encode_json(asdict(progress)))
        self._progress = progress

    def _layer_path(self, index: int) -> Path:
        return self.work / f"layer-{index:05d}.safetensors"

    def _state_path(self, name: str, num_layers: int) -> Path:
        return self.work / f"state-{name}-{num_layers:05d}.safetensors"

    def _part_paths(self) -> list[Path]:
        """Files of layers and rest that still exist, in the order in which shards take them."""
        paths = [self._layer_path(layer) for layer in range(self._progress.num_layers)]
        return [path for path in (*paths, self.work / "rest.safetensors") if path.exists()]

    def _stored(self) -> dict[str, tuple[Path, TensorEntry]]:
        """Where each committed tensor stands now: in a shard, or still in its layer's file."""
        shards = sorted((self.work / "checkpoint").glob("*.safetensors"))
        return {
            name: (path, entry) for path in (*shards, *self._part_paths()) for name, entry in read_header(path).items()
        }

    def _assemble_shards(self, folder: Path, max_shard_bytes: int) -> tuple[dict[str, str], int]:
        """Move parts into shards, one durable shard at a time; (tensor -> shard, total bytes)."""
        plan_path = self.work / "plan.json"
        if not plan_path.exists():
            entries = [entry for path in self._part_paths() for entry in in_file_order(read_header(path).values())]
            write_bytes(plan_path, encode_json({"shards": plan_shards(entries, max_shard_bytes)}))
        shards: list[list[str]] = json.loads(plan_path.read_bytes())["shards"]
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            shard = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if not shard.exists():
                stored = self._stored()
                _copy_tensors(shard, {name: stored[name] for name in names})
            weight_map |= dict.fromkeys(names, shard.name)
            for path in self._part_paths():
                if set(read_header(path)) <= set(weight_map):
                    path.unlink()
        total = sum(entry.num_bytes for _, entry in self._stored().values())
        return weight_map, total

    def _check_rules(self, declared: LayoutRules) -> None:
        """Our own guard: what the config says about layouts is what the layers were written with."""
        for key, value in (self._progress.rules or {}).items():
            if value is not None and getattr(declared, key) != value and not (key == "has_group_scales" and not value):
                raise ValueError(f"quantization_config says {key} = {getattr(declared, key)}, the layers have {value}")


def plan_shards(entries: Iterable[TensorEntry], max_shard_bytes: int) -> list[list[str]]:
    """Cut tensors, in the order given, into shards of at most `max_shard_bytes` of data (a larger tensor alone)."""
    shards: list[list[str]] = []
    used = 0
    for entry in entries:
        if not shards or used + entry.num_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry.name)
        used += entry.num_bytes
    return shards


def _copy_tensors(shard: Path, stored: Mapping[str, tuple[Path, TensorEntry]]) -> None:
    entries = in_file_order(entry for _, entry in stored.values())
    with durable_file(shard) as file:
        file.write(encode_header(entries))
        for entry in entries:
            copy_range(stored[entry.name][0], entry.start, entry.num_bytes, file)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    read_header(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _check_shared_inputs(prefix: str, linears: Mapping[str, PackedLinear]) -> None:
    """Linears that read one input share its permutation, map and clip, so that it is quantised once."""
    for names in _SHARING_INPUT:
        group = [(name, linears[prefix + name]) for name in names if prefix + name in linears]
        for name, linear in group[1:]:
            first = group[0][1]
            same_perm = first.perm is linear.perm or (
                first.perm is not None and linear.perm is not None and first.perm.equal(linear.perm)
            )
            same_map = [(s.width, s.act_bits) for s in first.layout.segments] == [
                (s.width, s.act_bits) for s in linear.layout.segments
            ]
            if not same_perm or not same_map or first.layout.clip != linear.layout.clip:
                raise ValueError(f"{prefix}{name} reads the input of {group[0][0]} but has another order, map or clip")


def _merge_rules(before: Mapping[str, Any] | None, linears: Mapping[str, PackedLinear]) -> dict[str, Any]:
    """Add what these layouts say to the rules so far. Raises ValueError where layers or linears disagree."""
    rules: dict[str, Any] = dict(before or {"is_symmetric": None, "down_hadamard": None, "has_group_scales": False})
    for name, linear in linears.items():
        layout = linear.layout
        seen: dict[str, Any] = {}
        if any(segment.act_bits == 4 for segment in layout.segments):
            seen["is_symmetric"] = layout.symmetric
        if name.endswith("down_proj"):
            seen["down_hadamard"] = layout.hadamard
        elif layout.hadamard != 1:
            raise ValueError(f"{name}: only down_proj has an online Hadamard, got block {layout.hadamard}")
        for key, value in seen.items():
            if rules[key] not in (None, value):
                raise ValueError(f"{name}: {key} is {value}, the linears before have {rules[key]}")
            rules[key] = value
        rules["has_group_scales"] = rules["has_group_scales"] or layout.group_size > 0
    return rules
