from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from w4a4.configs.errors import CheckpointError, NotFoundError, UnsupportedError
from w4a4.export.checkpoint import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, open_checkpoint
from w4a4.export.verify import verify_checkpoint

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
O = "model.layers.0.self_attn.o_proj"  # noqa: E741
FIRST_SHARD = "model-00001-of-00002.safetensors"


def found(path: Path) -> list[str]:
    return [str(finding) for finding in verify_checkpoint(path)]


def test_a_sound_checkpoint_has_no_findings(written: Path) -> None:
    names: list[str] = []
    assert verify_checkpoint(written, names.append) == []
    assert FIRST_SHARD in names and Q in names and "lm_head.weight" in names


def test_every_flipped_byte_is_found(breakable: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for path in sorted(breakable.path.iterdir()):
        if path.name in (MANIFEST_FILE, CONFIG_FILE):
            continue
        sound = path.read_bytes()
        for position in torch.randint(0, len(sound), (4,), generator=generator).tolist():
            broken = bytearray(sound)
            broken[position] ^= 1
            path.write_bytes(broken)
            assert any(finding.file == path.name for finding in verify_checkpoint(breakable.path)), (path, position)
        path.write_bytes(sound)
    assert found(breakable.path) == []


def test_flipped_bit_names_file_and_hashes(breakable: Any) -> None:
    expected = breakable.read_json(MANIFEST_FILE)["files"][FIRST_SHARD]["sha256"]
    shard = breakable.path / FIRST_SHARD
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x10
    shard.write_bytes(data)
    first = verify_checkpoint(breakable.path)[0]
    assert first.file == FIRST_SHARD and first.expected == f"sha256 {expected}" and len(first.got) == 64
    open_checkpoint(breakable.path)  # only hashes can tell


def test_truncated_shard(breakable: Any) -> None:
    shard = breakable.path / FIRST_SHARD
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    first, second = verify_checkpoint(breakable.path)
    assert (first.file, first.expected, first.got) == (FIRST_SHARD, f"{size} bytes", f"{size - 1} bytes")
    assert second.file == FIRST_SHARD and "truncated" in second.got


def test_several_faults_are_all_listed(breakable: Any) -> None:
    breakable.set_tensor(f"{Q}.input_perm", torch.zeros(64, dtype=torch.int32))
    breakable.set_tensor(f"{O}.weight_scale", torch.full((64, 1), float("nan")))
    breakable.set_tensor("lm_head.weight", torch.full((40, 64), float("inf")))
    places = [(finding.file, finding.tensor) for finding in verify_checkpoint(breakable.path)]
    second = breakable.file_of("lm_head.weight")
    assert places[:2] == [(FIRST_SHARD, f"{Q}.input_perm"), (FIRST_SHARD, f"{O}.weight_scale")]
    assert (second, "lm_head.weight") in places


def test_missing_and_extra_tensors_and_files(breakable: Any) -> None:
    breakable.set_tensor("model.norm.weight", None)
    breakable.set_tensor(f"{Q}.act_clip", None)
    breakable.set_tensor("surplus", torch.ones(1), near="lm_head.weight")
    (breakable.path / "recipe.yaml").unlink()
    (breakable.path / "payload.py").write_text("")
    (breakable.path / ".gitattributes").write_text("")  # what a download leaves
    findings = found(breakable.path)
    assert "model.norm.weight: got a missing tensor, expected the tensor" in findings
    assert f"{Q}.act_clip: got a missing tensor, expected the tensor" in findings
    assert any("surplus: got an extra tensor" in finding for finding in findings)
    assert "recipe.yaml: got a missing file, expected the file" in findings
    assert any(finding.startswith("payload.py: got an extra file") for finding in findings)
    assert len(findings) == 5


def test_wrong_dtype_and_shape_are_both_listed(breakable: Any) -> None:
    breakable.set_tensor(f"{Q}.weight_scale", torch.ones(64, 2).half())
    breakable.set_tensor("model.norm.weight", torch.ones(63))
    assert found(breakable.path) == [
        f"{breakable.file_of('model.norm.weight')}: model.norm.weight: got [63], expected shape [64]",
        f"{FIRST_SHARD}: {Q}.weight_scale: got F16, expected dtype F32",
    ]


@pytest.mark.parametrize(
    ("suffix", "change", "got"),
    [
        ("input_perm", lambda t: t.fill_(3), "63 repeated channels"),
        ("input_perm", lambda t: t + 1, "64"),
        ("block_precision", lambda t: t.fill_(6), "6"),
        ("block_precision", lambda t: t.flip(0), "blocks out of order"),
        ("weight_scale", lambda t: t.neg(), "128 others, the first"),
        ("act_clip", lambda t: t * float("nan"), "c = nan"),
        ("weight_shape", lambda t: t.flip(0) + 1, "[65, 65]"),
    ],
)
def test_values(breakable: Any, suffix: str, change: Callable[[torch.Tensor], torch.Tensor], got: str) -> None:
    breakable.set_tensor(f"{Q}.{suffix}", change(breakable.tensor(f"{Q}.{suffix}")))
    assert any(
        finding.tensor == f"{Q}.{suffix}" and finding.got.startswith(got)
        for finding in verify_checkpoint(breakable.path)
    )


def test_scales_that_do_not_fit_the_segments(breakable: Any) -> None:
    breakable.set_tensor(f"{Q}.weight_scale", torch.ones(64, 1))
    assert any("1 columns, expected 2 columns" in finding for finding in found(breakable.path))


def test_linears_of_one_input_share_its_order(breakable: Any) -> None:
    breakable.set_tensor(f"{K}.input_perm", torch.arange(64, dtype=torch.int32))
    [finding] = verify_checkpoint(breakable.path)
    assert finding.tensor == f"{K}.input_perm" and finding.expected == f"the same as {Q}.input_perm"
    breakable.set_tensor(f"{K}.input_perm", None)
    [finding] = verify_checkpoint(breakable.path)
    assert finding.tensor == f"{K}.input_perm"


def test_symlink_out_of_the_folder(breakable: Any, tmp_path: Path) -> None:
    shutil.move(breakable.path / "recipe.yaml", tmp_path / "elsewhere")
    (breakable.path / "recipe.yaml").symlink_to(tmp_path / "elsewhere")
    [finding] = verify_checkpoint(breakable.path)
    assert finding.file == "recipe.yaml" and "got a link" in finding.got


def test_index_with_a_path_in_it(breakable: Any) -> None:
    index = breakable.read_json(INDEX_FILE)
    index["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    breakable.write_json(INDEX_FILE, index)
    assert any("base name" in finding for finding in found(breakable.path))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {"a": 1}}', None])
def test_manifest_that_is_missing_or_malformed(breakable: Any, content: bytes | None) -> None:
    if content is None:
        (breakable.path / MANIFEST_FILE).unlink()
    else:
        (breakable.path / MANIFEST_FILE).write_bytes(content)
    [finding] = verify_checkpoint(breakable.path)
    assert finding.file == MANIFEST_FILE


def test_what_cannot_be_judged_raises(breakable: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify_checkpoint(tmp_path / "none")
    breakable.set_quantization("", "required_features", ["telepathy"])
    with pytest.raises(UnsupportedError, match="telepathy"):
        verify_checkpoint(breakable.path)
    (breakable.path / CONFIG_FILE).write_bytes(b"{")
    with pytest.raises(CheckpointError, match="config.json: not JSON"):
        verify_checkpoint(breakable.path)


def test_resharded_checkpoint_is_the_same(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.write(tmp_path / "one", max_shard_bytes=10**9)
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert found(tmp_path / "one") == []
