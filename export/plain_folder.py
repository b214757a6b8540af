"""A folder that other tools read: config.json, safetensors shards with an index, and the checkpoint's side files.

It grows beside its name and is renamed when it is whole. Tensors come in parts, so no more than one shard is in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from w4a4.configs.errors import UsageError
from w4a4.export.checkpoint import CARD_FILE, CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, RECIPE_FILE, PackedCheckpoint
from w4a4.export.durable_file import disk_errors, fsync_folder, write_bytes, write_tensors
from w4a4.export.manifest import encode_json

MAX_SHARD_BYTES = 5_000_000_000
_OWN_FILES = {CARD_FILE, CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, RECIPE_FILE}

TensorParts = Iterable[Mapping[str, Tensor]]


def write_plain_folder(
    checkpoint: PackedCheckpoint,
    output: Path,
    hf_config: Mapping[str, Any],
    parts: TensorParts,
    card: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write `output` and return it.

    Args:
        checkpoint: where tokenizer and other side files come from.
        parts: every tensor of the folder once, by full name; consumed one after the other.
        card: README.md.
    Raises:
        UsageError: the output exists, or cannot be written.
        ResourceError: the disk is full.
    """
    output = Path(os.path.abspath(output))
    if output.is_symlink() or (output.exists() and (output.is_file() or any(output.iterdir()))):
        raise UsageError(f"the output {output} exists", "choose another folder with -o, or remove it first")
    work = output.parent / f".{output.name}.w4a4-export"
    with disk_errors(work):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    try:
        index = _write_shards(work, parts, max_shard_bytes)
        write_bytes(work / INDEX_FILE, encode_json(index))
        write_bytes(work / CARD_FILE, card.encode())
        for path in sorted(checkpoint.path.iterdir()):
            if path.is_file() and path.name not in _OWN_FILES and path.suffix != ".safetensors":
                write_bytes(work / path.name, path.read_bytes())
        write_bytes(work / CONFIG_FILE, encode_json(hf_config))
        with disk_errors(output):
            os.rename(work, output)
            fsync_folder(output.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return output


def _write_shards(folder: Path, parts: TensorParts, max_shard_bytes: int) -> dict[str, Any]:
    """Write the shards and return the index."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        shards.append(sorted(held))
        write_tensors(folder / f"{len(shards)}.part.safetensors", held)
        held.clear()

    for part in parts:
        for name, tensor in part.items():
            if held and held_bytes + tensor.nbytes > max_shard_bytes:
                flush()
                held_bytes = 0
            held[name] = tensor
            held_bytes += tensor.nbytes
            total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"{number}.part.safetensors", folder / file)
        weight_map |= dict.fromkeys(names, file)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
