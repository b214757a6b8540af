from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from w4a4.calibrate.source import Source, open_source
from w4a4.calibrate.statistics import CalibrationRun, CalibrationStats, collect
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import ResourceError, UnsupportedError
from w4a4.configs.recipe import load_recipe, recipe_names
from w4a4.export import estimate as estimate_module
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.estimate import (
    Estimate,
    available_memory,
    check_resources,
    estimate,
    measured_macs_per_second,
    planned_layouts,
)
from w4a4.export.pipeline import quantize
from w4a4.export.summary import summarize_checkpoint

ModelFolder = Callable[..., Path]

GIB = 2**30


def llama(**changes: Any) -> ModelConfig:
    """Llama 3 70B."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    return ModelConfig.from_hf(values | changes)


@pytest.fixture(scope="module")
def source(make_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Source:
    sizes = {"hidden_size": 1024, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("source")
    return open_source(str(make_model(folder, "llama", **sizes, head_dim=128, num_hidden_layers=1)))


@pytest.fixture(scope="module")
def stats(source: Source) -> CalibrationStats:
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(4))
    return collect(source, CalibrationRun("tiny", source.identity.sha256, "words", 2, 16, 0, ""), tokens)


@pytest.mark.parametrize("name", recipe_names())
def test_the_checkpoint_is_as_large_as_was_said(
    name: str, source: Source, stats: CalibrationStats, tmp_path: Path
) -> None:
    """Rounding to nearest, which is faster and as large."""
    recipe = load_recipe(name, {"rounding": "rtn", "scale_search": False})
    checkpoint = open_checkpoint(quantize(source, stats, recipe, tmp_path / "out"))
    summary = summarize_checkpoint(checkpoint)
    said = estimate(source.config, recipe, 2, 16, 1e9)
    actual = summary.packed_bytes + summary.unquantized_bytes
    assert actual <= said.checkpoint_bytes * 1.001
    assert actual == pytest.approx(said.checkpoint_bytes, rel=0.02)
    if name not in ("dual", "fmpq-int8"):  # their budget is spent on what calibration finds
        for linear, layout in planned_layouts(source.config, recipe).items():
            planned = [(s.act_bits, s.weight_bits) for s in layout.segments]
            written = checkpoint.layout(f"model.layers.0.{linear}").segments
            assert set(planned) >= {(s.act_bits, s.weight_bits) for s in written}


def test_a_70b_model_fits_one_gpu() -> None:
    needs = estimate(llama(), load_recipe("dual"), 32, 2048, 2e13, "cuda")
    assert 25 * GIB < needs.device_memory < 40 * GIB
    assert needs.host_memory < 16 * GIB
    assert 38e9 < needs.checkpoint_bytes < 48e9  # 68.5 B linears at 4.8 bits, 2.1 B table entries in bf16
    assert needs.checkpoint_bytes < needs.disk < needs.checkpoint_bytes + 10e9
    assert 600 < needs.seconds < 7200
    assert needs.tokens == 65536
    on_cpu = estimate(llama(), load_recipe("dual"), 32, 2048, 2e13, "cpu")
    assert on_cpu.device_memory == 0 and on_cpu.host_memory >= needs.device_memory


def test_needs_grow_with_what_they_depend_on() -> None:
    dual, config = load_recipe("dual"), llama(num_hidden_layers=4)
    base = estimate(config, dual, 32, 2048, 1e12)
    longer = estimate(config, dual, 64, 2048, 1e12)
    deeper = estimate(replace(config, num_layers=8, sliding_windows=(None,) * 8), dual, 32, 2048, 1e12)
    cheaper = estimate(config, load_recipe("rtn"), 32, 2048, 1e12)
    stream = 32 * 2048 * 8192 * 4
    assert longer.disk - base.disk == 2 * stream
    assert longer.host_memory - base.host_memory == stream
    assert deeper.macs == 2 * base.macs and deeper.host_memory == base.host_memory
    assert cheaper.macs < base.macs and cheaper.host_memory < base.host_memory
    assert estimate(config, dual, 32, 2048, 2e12).seconds < base.seconds
    tied = replace(config, tie_word_embeddings=True)
    table = 128256 * 8192 * 2
    rtn = load_recipe("rtn")
    saved = (
        estimate(config, rtn, 32, 2048, 1e12).checkpoint_bytes - estimate(tied, rtn, 32, 2048, 1e12).checkpoint_bytes
    )
    assert saved == table
    # dual unties what was tied
    assert estimate(tied, dual, 32, 2048, 1e12).checkpoint_bytes == base.checkpoint_bytes


def test_forward_passes_are_counted() -> None:
    """Without rounding work, macs are three forward passes and the second moments."""
    config, tokens = llama(num_hidden_layers=1), 2 * 128
    one, two = (estimate(config, load_recipe("rtn"), n, 128, 1e12).macs for n in (2, 4))
    weights = sum(rows * columns for rows, columns in config.linear_shapes().values())
    moments = 8192**2 * 5 + 28672**2  # q/k/v, o, gate/up and two norms' covariance; down
    assert two - one == tokens * (3 * (weights + 128 * 8192) + moments)


def test_sizes_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="head_dim 80"):
        estimate(llama(head_dim=80), load_recipe("dual"), 1, 8, 1e9)


def test_the_rate_is_measured() -> None:
    assert 1e8 < measured_macs_per_second() < 1e14


class Usage(NamedTuple):
    free: int


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten GiB of memory and of disk, whatever this machine has."""
    monkeypatch.setattr(estimate_module, "available_memory", lambda place: 10 * GIB)
    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda path: Usage(10 * GIB))


NEEDS = Estimate(GIB, 0, 8 * GIB, 8 * GIB, 8 * GIB, 1.0, 1, 1)


@pytest.mark.usefixtures("machine")
def test_a_run_that_fits_is_let_through(tmp_path: Path) -> None:
    check_resources(NEEDS, tmp_path / "not" / "yet" / "there")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("changes", "device", "message", "hint"),
    [
        ({"host_memory": 11 * GIB}, "cpu", "needs about 11.0 GiB of memory on cpu, 10.0 GiB are free", "--samples"),
        ({"device_memory": 30 * GIB}, "cuda", "needs about 30.0 GiB of memory on cuda, 10.0 GiB are free", "--seq"),
        ({"disk": 12 * GIB}, "cpu", "needs about 12.0 GiB of disk under", "another disk with -o"),
    ],
)
def test_a_run_that_does_not_fit_says_what_to_change(
    changes: dict[str, int], device: str, message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match=message) as refused:
        check_resources(replace(NEEDS, **changes), tmp_path / "out", device)
    assert refused.value.exit_code == 7
    assert hint in refused.value.hint and "--no-preflight" in refused.value.hint


@pytest.mark.usefixtures("machine")
def test_a_quality_gate_that_does_not_fit_can_be_left_out(tmp_path: Path) -> None:
    needs = replace(NEEDS, gate_memory=14 * GIB)
    check_resources(needs, tmp_path / "out")
    with pytest.raises(ResourceError, match="quality gate needs about 14.0 GiB") as refused:
        check_resources(needs, tmp_path / "out", has_gate=True)
    assert "--gate-tokens 0" in refused.value.hint


def test_the_gate_runs_int8_codes_on_a_cpu_and_the_checkpoint_on_a_gpu() -> None:
    config = llama(num_hidden_layers=4)
    weights = 4 * sum(rows * columns for rows, columns in config.linear_shapes().values())
    dual, floats = (estimate(config, load_recipe(name), 1, 8, 1e9) for name in ("dual", "w4a16"))
    assert floats.gate_memory - dual.gate_memory == 3 * weights
    on_gpu = estimate(config, load_recipe("dual"), 1, 8, 1e9, "cuda")
    assert 0 < on_gpu.gate_memory - on_gpu.checkpoint_bytes < 2 * GIB


@pytest.mark.usefixtures("machine")
def test_work_that_is_there_needs_no_more_room(tmp_path: Path) -> None:
    work = tmp_path / ".out.w4a4-work" / "checkpoint"
    work.mkdir(parents=True)
    (work / "model.safetensors").write_bytes(bytes(5000))
    needs = replace(NEEDS, disk=10 * GIB + 5000)
    check_resources(needs, tmp_path / "out")
    with pytest.raises(ResourceError):
        check_resources(needs, tmp_path / "other")


def test_free_memory_of_this_machine() -> None:
    total = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < available_memory() <= total
