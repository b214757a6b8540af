from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from w4a4.calibrate.safetensors_source import INDEX, SafetensorsSource
from w4a4.calibrate.source import open_source
from w4a4.configs.errors import CheckpointError, NotFoundError, NumericsError, UnsupportedError, W4A4Error

ModelFolder = Callable[..., Path]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied-biased", "mistral", "qwen2", "qwen3"])
def test_every_tensor_is_read_as_it_was_written(kind: str, shard_size: str, model_folder: ModelFolder) -> None:
    folder = model_folder(kind, shard_size=shard_size)
    expected = stored_tensors(folder)
    assert (folder / INDEX).exists() == (shard_size == "60KB")
    source = open_source(str(folder))
    assert source.names() == set(expected)
    for name in expected:
        assert torch.equal(source.tensor(name), expected[name]), name
    assert source.identity.kind == "folder"
    assert source.identity.sha256 is not None and len(source.identity.sha256) == 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_widened_exactly(dtype: torch.dtype, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    tensors = {name: tensor.to(dtype) for name, tensor in stored_tensors(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(open_source(str(folder)).tensor(Q_PROJ), tensors[Q_PROJ].float())


def test_a_tied_head_gives_the_embedding(model_folder: ModelFolder) -> None:
    source = open_source(str(model_folder("qwen2")))
    assert "lm_head.weight" not in source.names()
    assert torch.equal(source.tensor("lm_head.weight"), source.tensor("model.embed_tokens.weight"))


def test_side_files_and_tokenizer(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", tokenizer=True)
    (folder / "README.md").write_text("the source's own card")
    (folder / "LICENSE").write_text("terms")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    source = open_source(str(folder))
    assert [path.name for path in source.side_files] == [
        "LICENSE",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = source.tokenizer()
    ids = tokenizer("héllo")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "héllo"
    assert tokenizer.eos_token_id == 257


def test_a_model_without_tokenizer_says_so(model_folder: ModelFolder) -> None:
    with pytest.raises(NotFoundError, match="no tokenizer"):
        open_source(str(model_folder("llama"))).tokenizer()


def test_a_hub_snapshot_may_link_into_its_own_cache(tmp_path: Path, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        os.rename(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert open_source(str(snapshot)).tensor(Q_PROJ).shape == (64, 64)


# Bad input: what is done to a good folder, the error and a word it must say.


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def truncate_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 50)


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 100_000_001) + b"{}")


def flip_header_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def overlapping(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        begin, end = header[Q_PROJ]["data_offsets"]
        header[Q_PROJ]["data_offsets"] = [begin - 4, end - 4]

    rewrite_header(folder, change)


def size_against_shape(folder: Path) -> None:
    rewrite_header(folder, lambda header: header[Q_PROJ].update(shape=[64, 65]))


def negative_offset(folder: Path) -> None:
    rewrite_header(folder, lambda header: header[Q_PROJ].update(data_offsets=[-4, 16380]))


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = stored_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop_tensor(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.__delitem__(Q_PROJ))


def extra_tensor(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}))


def wrong_shape(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 128)}))


def wrong_dtype(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))


def already_packed(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "w4a4"}))


def quantised(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "awq"}))


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (drop_config, NotFoundError, "no config.json"),
        (break_config, CheckpointError, "not JSON"),
        (drop_weights, NotFoundError, "no \\*.safetensors"),
        (only_pickles, UnsupportedError, "pytorch_model.bin"),
        (truncate, CheckpointError, "truncated"),
        (truncate_header, CheckpointError, "truncated"),
        (empty_file, CheckpointError, "got 0 bytes"),
        (huge_header, CheckpointError, "100,000,001"),
        (flip_header_bit, CheckpointError, "not JSON"),
        (overlapping, CheckpointError, "no overlap"),
        (size_against_shape, CheckpointError, "expected 16,640 for F32"),
        (negative_offset, CheckpointError, "whole numbers >= 0"),
        (drop_tensor, CheckpointError, f"tensor {Q_PROJ} missing"),
        (extra_tensor, CheckpointError, "q_proj.bias is not part"),
        (wrong_shape, CheckpointError, "\\[32, 128\\], expected \\[64, 64\\]"),
        (wrong_dtype, CheckpointError, "dtype I8"),
        (already_packed, UnsupportedError, "packed already"),
        (quantised, UnsupportedError, "awq"),
        (link_out, CheckpointError, "outside"),
    ],
)
def test_a_damaged_folder_is_refused(
    damage: Callable[[Path], None], error: type[W4A4Error], said: str, model_folder: ModelFolder
) -> None:
    folder = model_folder("llama")
    damage(folder)
    with pytest.raises(error, match=said):
        open_source(str(folder))


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil.safetensors", "a\\b.safetensors", "weights.bin", 3])
def test_an_index_names_plain_files_only(name: object, model_folder: ModelFolder) -> None:
    folder = model_folder("llama", shard_size="60KB")
    edit(folder / INDEX, lambda index: index["weight_map"].update({Q_PROJ: name}))
    with pytest.raises(CheckpointError, match="plain"):
        open_source(str(folder))


def test_a_missing_shard_is_named(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", shard_size="60KB")
    victim = sorted(folder.glob("*.safetensors"))[0]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        open_source(str(folder))


def test_an_index_that_contradicts_its_shards_is_refused(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", shard_size="60KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))

    def move(index: dict[str, Any]) -> None:
        other = next(shard for shard in shards if shard != index["weight_map"][Q_PROJ])
        index["weight_map"][Q_PROJ] = other

    edit(folder / INDEX, move)
    with pytest.raises(CheckpointError, match="not listed"):
        open_source(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_when_read(value: float, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ][3, 5] = value

    resave(folder, poison)
    source = open_source(str(folder))
    assert source.tensor("model.norm.weight").shape == (64,)
    with pytest.raises(NumericsError, match="q_proj"):
        source.tensor(Q_PROJ)


def test_a_file_cut_while_in_use_is_noticed(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    source = SafetensorsSource(folder, name="x")
    os.truncate(folder / "model.safetensors", 4096)
    with pytest.raises(CheckpointError, match="cut while in use"):
        for name in sorted(source.names()):
            source.tensor(name)


def test_a_tensor_that_does_not_exist_is_named(model_folder: ModelFolder) -> None:
    with pytest.raises(CheckpointError, match="no tensor model.nothing"):
        open_source(str(model_folder("llama"))).tensor("model.nothing")


def test_a_fine_tune_has_another_identity_and_a_copy_the_same(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama", shard_size="50KB")
    shutil.copytree(folder, tmp_path / "copy")
    shutil.copytree(folder, tmp_path / "tuned")
    shard = sorted((tmp_path / "tuned").glob("*.safetensors"))[-1]
    tensors = {name: value + 0.01 for name, value in load_file(shard).items()}
    save_file(tensors, shard, {"format": "pt"})
    original, copy, tuned = (
        open_source(str(path)).identity.sha256 for path in (folder, tmp_path / "copy", tmp_path / "tuned")
    )
    assert original == copy != tuned
