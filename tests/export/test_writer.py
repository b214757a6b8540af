from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from w4a4.configs.errors import CheckpointError, NumericsError, ResourceError, UsageError
from w4a4.export.checkpoint import INDEX_FILE, open_checkpoint
from w4a4.export.manifest import build_manifest
from w4a4.export.verify import verify_checkpoint
from w4a4.export.writer import CheckpointWriter, plan_shards
from w4a4.kernels.layout import LinearLayout, Segment

HERE = Path(__file__).parent


def hidden_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def write_one_layer(tiny: ModuleType, output: Path, run: dict[str, Any] | None = None) -> None:
    with CheckpointWriter(output, run or tiny.RUN) as writer:
        assert writer.open() == 0
        writer.save_state("hidden", {"x": torch.tensor([1.0])})
        writer.write_layer(0, *tiny.layer_of(0))


def test_output_is_complete_and_nothing_else_is_left(tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    side = tmp_path / "in" / "chat_template.jinja"
    side.write_text("{{ 1 }}")
    own = tmp_path / "in" / "README.md"
    own.write_text("# the source's card")
    assert tiny.write(tmp_path / "new" / "out", (*tiny.TOKENIZER_FILES, side, own)) == [0, 1]
    assert hidden_folders(tmp_path / "new") == []
    files = tiny.bytes_of(tmp_path / "new" / "out")
    assert files["chat_template.jinja"] == b"{{ 1 }}" and files["README.md"] == b"# tiny\n"
    assert files["recipe.yaml"] == b"name: dual\n"
    manifest = json.loads(files["w4a4_manifest.json"])
    assert set(manifest["files"]) == set(files) - {"w4a4_manifest.json"}
    assert manifest["quality"] == {"perplexity": 12.5} and manifest["source"] == {"name": "tiny"}
    assert verify_checkpoint(tmp_path / "new" / "out") == []


def test_features_are_declared(written: Path) -> None:
    assert open_checkpoint(written).quantization["required_features"] == [
        "down-hadamard", "int8-weights", "k-mean", "kv4", "qk-hadamard", "sink-tokens",
    ]  # fmt: skip


def test_same_run_same_bytes(tiny: ModuleType, written: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path / "again")
    assert tiny.bytes_of(tmp_path / "again") == tiny.bytes_of(written)


def test_stopped_run_resumes_at_the_next_layer(tiny: ModuleType, written: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_one_layer(tiny, output)
    assert not output.exists() and hidden_folders(tmp_path) == [".out.w4a4-work"]
    assert tiny.write(output) == [1]
    assert tiny.bytes_of(output) == tiny.bytes_of(written)


@pytest.mark.timeout(120)
def test_killed_at_every_step_resumes_bit_identically(tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "killed_runs.py"), str(tmp_path)]
    result = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) > 40  # kills tried: the run changes the disk that often


def test_state_belongs_to_the_layer_it_was_committed_with(tiny: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_one_layer(tiny, output)
    with CheckpointWriter(output, tiny.RUN) as writer:
        writer.open()
        writer.save_state("hidden", {"x": torch.tensor([2.0])})  # staged, and never committed
    with CheckpointWriter(output, tiny.RUN) as writer:
        assert writer.open() == 1
        state = writer.load_state("hidden")
        assert state is not None and state["x"].tolist() == [1.0]
        assert writer.load_state("other") is None
        writer.write_layer(1, *tiny.layer_of(1))
        assert writer.load_state("hidden") is None  # layer 1 saved none
        assert [path.name for path in writer.work.glob("state-*")] == []
        with pytest.raises(ValueError, match="letters, digits"):
            writer.save_state("../x", {})


def test_committed_layers_can_be_read(tiny: ModuleType, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", tiny.RUN) as writer:
        writer.open()
        for index in range(2):
            writer.write_layer(index, *tiny.layer_of(index))
        writer.write_rest(tiny.rest())
        for is_assembled in (False, True):
            if is_assembled:
                writer.assemble(tiny.HF_CONFIG, tiny.QUANTIZATION, "", (), 30_000)
                assert list(writer.work.glob("layer-*")) == []
            linears, tensors = writer.read_layer(1)
            expected_linears, expected_tensors = tiny.layer_of(1)
            assert linears.keys() == expected_linears.keys() and tensors.keys() == expected_tensors.keys()
            for prefix, linear in linears.items():
                expected = expected_linears[prefix]
                assert linear.layout == expected.layout and linear.weight_scales.equal(expected.weight_scales)
                assert all(a.equal(b) for a, b in zip(linear.weights, expected.weights, strict=True))
            assert all(tensors[name].equal(tensor) for name, tensor in expected_tensors.items())
        with pytest.raises(ValueError, match="2 layers are written, got layer 2"):
            writer.read_layer(2)


def test_what_is_measured_is_what_is_published(tiny: ModuleType, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", tiny.RUN) as writer:
        writer.open()
        for index in range(2):
            writer.write_layer(index, *tiny.layer_of(index))
        writer.write_rest(tiny.rest())
        with pytest.raises(ValueError, match="assemble comes before publish"):
            writer.publish({}, "")
        assembled = writer.assemble(tiny.HF_CONFIG, tiny.QUANTIZATION, "", ())
        before = open_checkpoint(assembled).tensor("lm_head.weight").clone()
        output = writer.publish({}, "card")
    assert output == tmp_path / "out" and open_checkpoint(output).tensor("lm_head.weight").equal(before)


def test_shards_keep_to_their_limit(tiny: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out"
    tiny.write(output, max_shard_bytes=8_000)
    shards = sorted(output.glob("*.safetensors"))
    checkpoint = open_checkpoint(output)
    sizes = {shard.name: 0 for shard in shards}
    for name, entry in checkpoint.entries.items():
        sizes[checkpoint.files[name]] += entry.num_bytes
    assert len(shards) > 5 and max(sizes.values()) <= 8_000 and min(sizes.values()) > 0
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((output / INDEX_FILE).read_bytes())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert verify_checkpoint(output) == []


def test_plan_gives_a_larger_tensor_its_own_shard() -> None:
    from w4a4.configs.safetensors_header import TensorEntry

    entries = [TensorEntry(name, "U8", (size,)) for name, size in [("a", 3), ("b", 9), ("c", 2), ("d", 2), ("e", 1)]]
    assert plan_shards(entries, 4) == [["a"], ["b"], ["c", "d"], ["e"]]


def test_output_exists(tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("out", "file", "link"):
        with pytest.raises(UsageError, match=f"{name} exists") as caught:
            CheckpointWriter(tmp_path / name, tiny.RUN).open()
        assert caught.value.exit_code == 2 and "-o" in caught.value.hint
    assert (tmp_path / "out" / "precious").read_text() == "x"
    assert hidden_folders(tmp_path) == []


def test_an_empty_folder_may_become_the_output(tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    tiny.write(tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out") == []


def test_output_that_appears_during_the_run_is_not_touched(tiny: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with CheckpointWriter(output, tiny.RUN) as writer:
        writer.open()
        for index in range(2):
            writer.write_layer(index, *tiny.layer_of(index))
        writer.write_rest(tiny.rest())
        output.mkdir()
        (output / "precious").write_text("x")
        with pytest.raises(UsageError, match="appeared during the run"):
            writer.finish(tiny.HF_CONFIG, tiny.QUANTIZATION, "", (), {}, "")
    assert [path.name for path in output.iterdir()] == ["precious"]
    (output / "precious").unlink()
    assert tiny.write(output) == []  # nothing was lost: no layer is made again
    assert verify_checkpoint(output) == []


def test_output_is_the_source(tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "alias").symlink_to(tmp_path / "model")
    for output in (tmp_path / "model", tmp_path / "model" / ".." / "model", tmp_path / "alias"):
        with pytest.raises(UsageError, match="is the source itself"):
            CheckpointWriter(output, tiny.RUN, source=tmp_path / "model").open()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_different_run_does_not_continue(tiny: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_one_layer(tiny, output)
    with pytest.raises(UsageError, match="work of a different run.*different: seed") as caught:
        CheckpointWriter(output, tiny.RUN | {"seed": 1}).open()
    assert "rm -r" in caught.value.hint
    assert tiny.write(output) == [1]


def test_abandon_removes_the_work(tiny: ModuleType, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", tiny.RUN) as writer:
        writer.open()
        writer.write_layer(0, *tiny.layer_of(0))
        writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_on_one_output(tiny: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with CheckpointWriter(output, tiny.RUN) as first:
        first.open()
        with pytest.raises(UsageError, match=f"another job \\(process {os.getpid()}\\) is writing"):
            CheckpointWriter(output, tiny.RUN).open()
        first.write_layer(0, *tiny.layer_of(0))
    with CheckpointWriter(output, tiny.RUN) as second:
        assert second.open() == 1


def test_lock_dies_with_its_process(tiny: ModuleType, tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from w4a4.export.output_lock import OutputLock\n"
        "lock = OutputLock(pathlib.Path(sys.argv[1])); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    work = tmp_path / ".out.w4a4-work"
    work.mkdir()
    command = [sys.executable, "-c", code, str(work / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"process {holder.pid}"):
            CheckpointWriter(tmp_path / "out", tiny.RUN).open()
        holder.kill()
    with CheckpointWriter(tmp_path / "out", tiny.RUN) as writer:
        assert writer.open() == 0


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tmpfs with the options of the parameter; skips where mounting is not permitted."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    try:
        result = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(folder)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no mount command")
    if result.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {result.stderr.strip()}")
    yield folder
    # lazily: a traceback that pytest keeps may still hold a mapped file
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("mounted", ["size=400k"], indirect=True)
def test_full_disk(tiny: ModuleType, written: Path, mounted: Path) -> None:
    output = mounted / "out"
    ballast = mounted / "ballast"
    ballast.write_bytes(bytes(350_000))
    with pytest.raises(ResourceError, match="disk full while writing .*MB free") as caught:
        tiny.write(output)
    assert caught.value.exit_code == 7 and "resumes" in caught.value.hint
    assert not output.exists() and not list(mounted.rglob("*.part"))
    ballast.unlink()
    assert tiny.write(output) != [0, 1]
    assert tiny.bytes_of(output) == tiny.bytes_of(written)


@pytest.mark.parametrize("mounted", ["ro"], indirect=True)
def test_read_only_disk(tiny: ModuleType, mounted: Path) -> None:
    with pytest.raises(UsageError, match="cannot write .*Read-only file system") as caught:
        CheckpointWriter(mounted / "out", tiny.RUN).open()
    assert "-o" in caught.value.hint


def test_read_only_folder(tiny: ModuleType, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write to any folder")
    try:
        with pytest.raises(UsageError, match="cannot write .*Permission denied"):
            CheckpointWriter(tmp_path / "out", tiny.RUN).open()
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, ResourceError),
        (errno.EDQUOT, ResourceError),
        (errno.EACCES, UsageError),
        (errno.EROFS, UsageError),
    ],
)
def test_what_the_disk_refuses_loses_nothing(
    tiny: ModuleType, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    output = tmp_path / "out"
    write_one_layer(tiny, output)

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(error, match=os.strerror(code)):
            tiny.write(output)
    assert not list(tmp_path.rglob("*.part"))
    assert tiny.write(output) == [1]
    assert tiny.bytes_of(output) == tiny.bytes_of(written)


def test_an_unknown_oserror_is_not_hidden(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="broken"):
        tiny.write(tmp_path / "out")


def test_wrong_use(tiny: ModuleType, tmp_path: Path) -> None:
    linears, tensors = tiny.layer_of(0)
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    with CheckpointWriter(tmp_path / "out", tiny.RUN) as writer:
        writer.open()
        with pytest.raises(ValueError, match="layer 0 is next, got layer 1"):
            writer.write_layer(1, *tiny.layer_of(1))
        with pytest.raises(ValueError, match="model.norm.weight is not a tensor of layer 0"):
            writer.write_layer(0, linears, {"model.norm.weight": torch.ones(1)})
        for changed in (
            replace(linears[k], perm=linears[k].perm.flip(0)),
            replace(linears[k], perm=None),
            replace(linears[k], layout=replace(linears[k].layout, clip=(0.5, 1.0))),
            tiny.random_linear(LinearLayout(32, (Segment(64, 4, 4),)), 0),
        ):
            with pytest.raises(ValueError, match="k_proj reads the input of self_attn.q_proj but has another"):
                writer.write_layer(0, linears | {k: changed}, tensors)
        with pytest.raises(ValueError, match="only down_proj has an online Hadamard"):
            writer.write_layer(0, {q: replace(linears[q], layout=replace(linears[q].layout, hadamard=16))}, tensors)
        with pytest.raises(NumericsError, match="q_proj.weight_scale"):
            writer.write_layer(0, {q: replace(linears[q], weight_scales=linears[q].weight_scales * 0)}, tensors)
        writer.write_layer(0, linears, tensors)
        down = "model.layers.1.mlp.down_proj"
        later, more = tiny.layer_of(1)
        changed = replace(later[down], layout=replace(later[down].layout, hadamard=16))
        with pytest.raises(ValueError, match="down_hadamard is 16, the linears before have 32"):
            writer.write_layer(1, later | {down: changed}, more)
        with pytest.raises(ValueError, match="write_rest comes before assemble"):
            writer.assemble(tiny.HF_CONFIG, tiny.QUANTIZATION, "", ())


def test_config_that_contradicts_the_layers_is_not_published(tiny: ModuleType, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", tiny.RUN) as writer:
        writer.open()
        writer.write_layer(0, *tiny.layer_of(0))
        writer.write_rest(tiny.rest())
        wrong = tiny.QUANTIZATION | {"transforms": {"down_hadamard": 1}}
        with pytest.raises(ValueError, match="down_hadamard = 1, the layers have 32"):
            writer.assemble(tiny.HF_CONFIG, wrong, "", ())
        with pytest.raises(CheckpointError, match="got a missing tensor"):  # one layer of two
            writer.assemble(tiny.HF_CONFIG, tiny.QUANTIZATION, "", ())
        weights = tmp_path / "pytorch_model.bin"
        weights.write_bytes(b"")
        with pytest.raises(UsageError, match="holds weights"):
            writer.assemble(tiny.HF_CONFIG, tiny.QUANTIZATION, "", (weights,))
    assert not (tmp_path / "out").exists()


def test_unknown_manifest_sections(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown manifest sections"):
        build_manifest(tmp_path, {"qality": {}})
