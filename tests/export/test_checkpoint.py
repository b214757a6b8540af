from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from w4a4.configs.errors import CheckpointError, NotFoundError, NumericsError, UnsupportedError
from w4a4.export.checkpoint import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, is_packed, open_checkpoint

Q = "model.layers.0.self_attn.q_proj"
FIRST_SHARD = "model-00001-of-00002.safetensors"


def test_everything_reads_back(tiny: ModuleType, written: Path) -> None:
    checkpoint = open_checkpoint(written)
    assert checkpoint.config.num_layers == 2
    for index in range(2):
        linears, tensors = tiny.layer_of(index)
        for prefix, linear in linears.items():
            back = checkpoint.linear(prefix)
            assert back.layout == linear.layout == checkpoint.layout(prefix)
            assert all(a.equal(b) for a, b in zip(back.weights, linear.weights, strict=True))
            assert back.weight_scales.equal(linear.weight_scales)
            assert (back.perm is None) == (linear.perm is None)
            assert linear.perm is None or (back.perm is not None and back.perm.equal(linear.perm))
            assert (back.bias is None) == (linear.bias is None)
            assert linear.bias is None or (back.bias is not None and back.bias.equal(linear.bias))
        assert all(checkpoint.tensor(name).equal(tensor) for name, tensor in tensors.items())
    for name, tensor in tiny.rest().items():
        assert checkpoint.tensor(name).equal(tensor) and checkpoint.tensor(name).dtype == tensor.dtype


def test_unknown_names(written: Path) -> None:
    checkpoint = open_checkpoint(written)
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        checkpoint.tensor("x")
    with pytest.raises(CheckpointError, match="no packed linear 'lm_head'"):
        checkpoint.linear("lm_head")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint folder"):
        open_checkpoint(tmp_path / "none")


def test_no_config(tmp_path: Path, breakable: Any) -> None:
    with pytest.raises(NotFoundError, match="it has no config.json"):
        open_checkpoint(tmp_path)
    assert not is_packed(tmp_path)
    (breakable.path / CONFIG_FILE).unlink()
    with pytest.raises(CheckpointError, match="config.json: missing"):
        open_checkpoint(breakable.path)


@pytest.mark.parametrize("content", [b"[]", b"{", b"null", b'{"quantization_config": null}'])
def test_a_damaged_checkpoint_is_known_by_its_manifest(breakable: Any, content: bytes) -> None:
    (breakable.path / CONFIG_FILE).write_bytes(content)
    assert is_packed(breakable.path)
    (breakable.path / MANIFEST_FILE).unlink()
    assert not is_packed(breakable.path)


def test_a_checkpoint_without_manifest_is_known_by_its_config(breakable: Any) -> None:
    (breakable.path / MANIFEST_FILE).unlink()
    assert is_packed(breakable.path)
    breakable.write_json(CONFIG_FILE, {"quantization_config": {"quant_method": "gptq"}})
    assert not is_packed(breakable.path)
    assert not is_packed(breakable.path / CONFIG_FILE)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_tensors_keep_no_shard_mapped(written: Path) -> None:
    checkpoint = open_checkpoint(written)
    kept = [checkpoint.tensor("model.norm.weight"), checkpoint.linear(Q).weight_scales]
    assert str(written) in Path("/proc/self/maps").read_text()
    del checkpoint
    gc.collect()
    assert str(written) not in Path("/proc/self/maps").read_text()
    assert all(tensor.isfinite().all() for tensor in kept)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_mean"])
def test_numbers_that_are_not_finite(breakable: Any, name: str) -> None:
    breakable.set_tensor(name, with_item(2, float("inf"))(breakable.tensor(name)))
    checkpoint = open_checkpoint(breakable.path)
    with pytest.raises(NumericsError, match=f"{name}: got NaN or infinity") as caught:
        checkpoint.tensor(name)
    assert caught.value.exit_code == 6
    assert not checkpoint.stored(name).isfinite().all()


def test_only_pickled_weights(breakable: Any) -> None:
    for file in (INDEX_FILE, FIRST_SHARD, FIRST_SHARD.replace("00001", "00002", 1)):
        (breakable.path / file).unlink()
    (breakable.path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match="pickled weights"):
        open_checkpoint(breakable.path)


def test_truncated_shard(breakable: Any) -> None:
    shard = breakable.path / FIRST_SHARD
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{FIRST_SHARD}.*truncated"):
        open_checkpoint(breakable.path)


def test_missing_shard(breakable: Any) -> None:
    (breakable.path / FIRST_SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST_SHARD}: missing"):
        open_checkpoint(breakable.path)


def test_header_over_100_mb(breakable: Any) -> None:
    with (breakable.path / FIRST_SHARD).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    with pytest.raises(CheckpointError, match="header of 100,000,001 bytes"):
        open_checkpoint(breakable.path)


@pytest.mark.parametrize(
    "name", ["../tiny/x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin", 7, None]
)
def test_index_entry_with_a_path_in_it(breakable: Any, name: object) -> None:
    index = breakable.read_json(INDEX_FILE)
    index["weight_map"]["model.norm.weight"] = name
    breakable.write_json(INDEX_FILE, index)
    with pytest.raises(CheckpointError, match="expected the base name of a .safetensors file"):
        open_checkpoint(breakable.path)


@pytest.mark.parametrize("file", [FIRST_SHARD, CONFIG_FILE, INDEX_FILE])
def test_symlink_out_of_the_folder(breakable: Any, tmp_path: Path, file: str) -> None:
    outside = tmp_path / "outside"
    os.rename(breakable.path / file, outside)
    (breakable.path / file).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{file}: got a link to {outside}"):
        open_checkpoint(breakable.path)


def test_a_fifo_is_no_shard(breakable: Any) -> None:
    (breakable.path / FIRST_SHARD).unlink()
    os.mkfifo(breakable.path / FIRST_SHARD)
    with pytest.raises(CheckpointError, match="expected a regular file"):
        open_checkpoint(breakable.path)


def test_links_of_a_hub_cache_are_followed(written: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(written.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    expected = open_checkpoint(written).tensor("lm_head.weight")
    assert open_checkpoint(snapshot).tensor("lm_head.weight").equal(expected)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"[" * 100_000, b"nul"])
@pytest.mark.parametrize("file", [CONFIG_FILE, INDEX_FILE])
def test_broken_json(breakable: Any, file: str, content: bytes) -> None:
    (breakable.path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file):
        open_checkpoint(breakable.path)


def test_newer_major_and_unknown_feature(breakable: Any) -> None:
    breakable.set_quantization("", "required_features", ["telepathy"])
    with pytest.raises(UnsupportedError, match="requires telepathy"):
        open_checkpoint(breakable.path)
    breakable.set_quantization("", "format_version", "2.0")
    with pytest.raises(UnsupportedError, match="checkpoint format 2.0"):
        open_checkpoint(breakable.path)


def test_newer_minor_with_unknown_keys_opens(breakable: Any) -> None:
    breakable.set_quantization("", "format_version", "1.3")
    breakable.set_quantization("weights", "entropy_coded", False)
    assert open_checkpoint(breakable.path).linear(Q).layout.in_features == 64


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{Q}.weight_packed", torch.zeros(64, 6, dtype=torch.int64), "got I64, expected dtype I32"),
        (f"{Q}.weight_packed", torch.zeros(63, 6, dtype=torch.int32), r"got \[63, 6\], expected shape \[64, any\]"),
        (f"{Q}.weight_packed", torch.zeros(64, 7, dtype=torch.int32), "got 72, expected 64 stored weight columns"),
        (f"{Q}.weight_packed", torch.zeros(64 * 6, dtype=torch.int32), r"expected shape \[64, any\]"),
        (f"{Q}.weight_int8", None, "got 48, expected 64 stored weight columns"),
        (f"{Q}.weight_scale", None, "got none, expected the tensor"),
        (f"{Q}.weight_scale", torch.ones(64, 2).half(), "got F16, expected dtype F32"),
        (f"{Q}.block_precision", None, "got a missing tensor"),
        (f"{Q}.block_precision", torch.full((5,), 4, dtype=torch.uint8), "number of blocks that divides 64"),
        (f"{Q}.block_precision", torch.empty(0, dtype=torch.uint8), "number of blocks that divides 64"),
        (f"{Q}.act_clip", torch.ones(3), r"expected shape \[2\]"),
        (f"{Q}.input_perm", torch.arange(63, dtype=torch.int32), r"got \[63\], expected shape \[64\]"),
        (f"{Q}.weight_shape", torch.tensor([64, 64], dtype=torch.int32), "got I32, expected dtype I64"),
        ("model.norm.weight", None, "model.norm.weight: got a missing tensor"),
        ("model.norm.weight", torch.ones(65), r"got \[65\], expected shape \[64\]"),
        ("lm_head.weight", torch.ones(40, 64, dtype=torch.int8), "got I8, expected dtype BF16 or F16 or F32"),
        ("model.layers.1.self_attn.k_mean", None, "got a missing tensor"),
        ("model.layers.7.mlp.extra", torch.ones(1), "got an extra tensor"),
    ],
)  # fmt: skip
def test_wrong_dtype_shape_missing_or_extra(
    breakable: Any, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    breakable.set_tensor(name, tensor, near=None if "extra" not in name else "model.norm.weight")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(breakable.path)


def test_index_and_shard_disagree(breakable: Any) -> None:
    index = breakable.read_json(INDEX_FILE)
    del index["weight_map"]["model.norm.weight"]
    breakable.write_json(INDEX_FILE, index)
    with pytest.raises(CheckpointError, match="model.norm.weight: got an extra tensor"):
        open_checkpoint(breakable.path)
    index["weight_map"]["model.norm.weight"] = FIRST_SHARD
    breakable.write_json(INDEX_FILE, index)
    with pytest.raises(
        CheckpointError, match="model.norm.weight: got a missing tensor, expected the tensor, as the in"
    ):
        open_checkpoint(breakable.path)


def test_more_layers_than_tensors_costs_no_memory(breakable: Any) -> None:
    config = breakable.read_json(CONFIG_FILE)
    config["num_hidden_layers"] = 2**31 - 1
    breakable.write_json(CONFIG_FILE, config)
    with pytest.raises(CheckpointError, match="num_hidden_layers: got 2147483647"):
        open_checkpoint(breakable.path)


def test_hadamard_that_does_not_divide(breakable: Any) -> None:
    breakable.set_quantization("transforms", "down_hadamard", 64)
    with pytest.raises(CheckpointError, match="down_hadamard: got 64, expected a block that divides 96"):
        open_checkpoint(breakable.path)


def with_item(index: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return change


BAD_VALUES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("input_perm", lambda perm: with_item(0, perm[1].item())(perm), "got 1 repeated channels, expected every channel"),
    ("input_perm", with_item(5, 64), "got 64, expected channels 0 to 63"),
    ("input_perm", with_item(5, -1), "got -1, expected channels 0 to 63"),
    ("block_precision", with_item(0, 5), "got 5, expected activation bits 4, 8 or 16"),
    ("block_precision", with_item(0, 0), "got 0, expected activation bits 4, 8 or 16"),
    ("block_precision", lambda blocks: blocks.flip(0), "got blocks out of order"),
    ("block_precision", with_item(3, 4), "got 64, expected at most 48 channels at 4 bits"),
    ("weight_scale", with_item(3, 0.0), "got 1 others, the first 0.0, expected finite scales > 0"),
    ("weight_scale", with_item(3, -0.5), "expected finite scales > 0"),
    ("weight_scale", with_item(3, float("nan")), "the first nan"),
    ("weight_scale", with_item(3, float("inf")), "the first inf"),
    ("act_clip", with_item(0, float("inf")), "got c = inf, expected a finite c > 0"),
    ("act_clip", with_item(0, 0.0), "got c = 0.0"),
    ("act_clip", with_item(1, float("nan")), "got beta = nan, expected beta > 0"),
    ("weight_shape", with_item(1, 80), r"got \[64, 80\]"),
]


@pytest.mark.parametrize(("suffix", "change", "message"), BAD_VALUES, ids=[f"{s}: {m}" for s, _, m in BAD_VALUES])
def test_values_are_checked_as_a_linear_is_read(
    breakable: Any, suffix: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    name = f"{Q}.{suffix}"
    breakable.set_tensor(name, change(breakable.tensor(name)))
    checkpoint = open_checkpoint(breakable.path)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.linear(Q)
    assert caught.value.exit_code == 5 and FIRST_SHARD in caught.value.message and name in caught.value.message


def test_bias_that_is_not_finite(breakable: Any) -> None:
    name = "model.layers.1.self_attn.o_proj.bias"
    breakable.set_tensor(name, with_item(2, float("nan"))(breakable.tensor(name)))
    with pytest.raises(NumericsError, match="o_proj.bias: got NaN or infinity"):
        open_checkpoint(breakable.path).linear("model.layers.1.self_attn.o_proj")


def test_config_keeps_what_the_source_had(tiny: ModuleType, written: Path) -> None:
    config = json.loads((written / CONFIG_FILE).read_bytes())
    assert {key: value for key, value in config.items() if key != "quantization_config"} == tiny.HF_CONFIG
