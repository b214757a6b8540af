"""A tiny model through every command, as a person would type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from w4a4.cli.newest_checkpoint import newest_checkpoint

ModelFolder = Callable[..., Path]
PACKABLE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
CALIBRATION = ("--samples", 2, "--seq", 32)


@pytest.fixture
def model(model_folder: ModelFolder) -> Path:
    return model_folder("llama", tokenizer=True, **PACKABLE)


@pytest.fixture
def packed(invoke: Any, model: Path, text_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "packed"
    result = invoke(
        "quantize",
        model,
        "-o",
        folder,
        "--recipe",
        "rtn",
        "--data",
        text_file,
        *CALIBRATION,
        "--gate-tokens",
        0,
        "--no-report",
    )
    assert result.code == 0, result.err
    return folder


def test_calibrate_then_quantize(invoke: Any, model: Path, text_file: Path, tmp_path: Path) -> None:
    statistics = tmp_path / "statistics"
    result = invoke("calibrate", model, "-o", statistics, "--data", text_file, *CALIBRATION)
    assert result.code == 0, result.err
    assert result.out == f"{statistics}\n"
    assert (statistics / "report.html").stat().st_size > 10_000
    assert "layer 2/2" in result.err
    again = invoke("calibrate", model, "-o", statistics, "--data", text_file, *CALIBRATION)
    assert again.code == 2
    assert "exists" in again.err

    folder = tmp_path / "packed"
    arguments = ("quantize", model, "-o", folder, "--recipe", "fmpq", "--statistics", statistics, "--gate-tokens", 0)
    document = invoke(*arguments, "--set", "budget=0.5", "--kv", 16, "--json").document
    assert document["schema"] == "w4a4.quantization"
    assert (document["recipe"]["budget"], document["recipe"]["kv_bits"]) == (0.5, 16)
    manifest = json.loads((folder / "w4a4_manifest.json").read_text())
    assert manifest["calibration"]["samples"] == 2
    assert newest_checkpoint() == folder
    assert document["report"] == str(statistics / "report.html")
    page = (statistics / "report.html").read_text()
    assert "fmpq" in page
    assert "down_proj" in page  # the errors of its layers
    assert invoke(*arguments).code == 2


def test_quantize_measures_and_names_its_default_output(
    invoke: Any, model: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path("tiny")
    model.rename(source)
    result = invoke(
        "quantize", "./tiny", "--recipe", "w8a8", "--data", text_file, *CALIBRATION, "--gate-tokens", 64, "--json"
    )
    assert result.code == 0, result.err
    quality = result.document["quality"]
    assert Path("tiny-w4a4/config.json").is_file()
    assert Path("tiny-w4a4-report/report.html").is_file()
    assert quality["tokens_scored"] == 63
    assert quality["perplexity"] == pytest.approx(quality["source_perplexity"], rel=0.1)
    assert quality["sample"]["source"].startswith("The capital of France is")
    assert not list(Path().glob(".*"))  # neither work nor statistics are left behind


def test_a_failed_gate_publishes_nothing_and_the_work_is_kept(
    invoke: Any, model: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "packed"
    arguments = ("quantize", model, "-o", folder, "--recipe", "rtn", "--data", text_file, *CALIBRATION)
    result = invoke(*arguments, "--gate-tokens", 64, "--fail-if-ppl-above", 1.5)
    assert result.code == 6
    assert "exceeds 1.5" in result.err
    assert not folder.exists()
    again = invoke(*arguments, "--gate-tokens", 64)
    assert again.code == 0
    assert "using the statistics of the run before" in again.err
    assert "quantize layer" not in again.err  # every layer was done
    assert folder.is_dir()


def test_the_gate_measures_the_same_with_little_memory(
    packed: Path, model: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from w4a4.calibrate.source import open_source
    from w4a4.cli.quality_gate import QualityGate

    gate = QualityGate(open_source(str(model)), str(text_file), 256, torch.device("cpu"), None)
    resident = gate.measure(packed)
    monkeypatch.setattr("w4a4.export.estimate.available_memory", lambda device: 0)
    streamed = gate.measure(packed)
    assert resident.pop("sample")["prompt"] == "The capital of France is"
    assert streamed.keys() == resident.keys()
    for name, value in resident.items():
        assert streamed[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), name


def test_a_gate_that_does_not_fit_in_memory_loses_no_layer(
    invoke: Any, model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4a4.cli.quality_gate import QualityGate

    def full(gate: QualityGate, folder: Path) -> None:
        raise MemoryError("Unable to allocate 519. MiB")

    folder = tmp_path / "packed"
    arguments = ("quantize", model, "-o", folder, "--recipe", "rtn", "--data", text_file, *CALIBRATION, "--no-report")
    monkeypatch.setattr(QualityGate, "measure", full)
    failed = invoke(*arguments)
    assert failed.code == 7
    assert "out of memory in the quality gate: Unable to allocate 519. MiB" in failed.err
    assert "--gate-tokens 0" in failed.err
    again = invoke(*arguments, "--gate-tokens", 0)
    assert (again.code, "quantize layer" in again.err) == (0, False)


def test_a_signal_stops_after_a_layer_and_the_same_command_goes_on(
    invoke: Any, model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4a4.cli import quantize

    folder = tmp_path / "packed"
    arguments = ("quantize", model, "-o", folder, "--recipe", "rtn", "--data", text_file, *CALIBRATION)
    arguments += ("--gate-tokens", 0, "--no-report")
    described = quantize.describe_layer

    def signalling(report: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return described(report)

    monkeypatch.setattr(quantize, "describe_layer", signalling)
    monkeypatch.setattr(sys, "argv", ["w4a4", "quantize", "a model"])
    result = invoke(*arguments)
    assert result.code == 75
    assert "stopped after 1 of 2 layers" in result.err
    assert "w4a4 quantize 'a model'" in result.err
    assert not folder.exists()
    monkeypatch.setattr(quantize, "describe_layer", described)
    again = invoke(*arguments)
    assert again.code == 0
    assert "quantize layer 1/2" not in again.err
    assert "quantize layer 2/2" in again.err


def test_an_output_that_is_there_is_not_touched(invoke: Any, model: Path, text_file: Path) -> None:
    before = sorted(model.iterdir())
    for command in ("calibrate", "quantize"):
        arguments = (command, model, "--data", text_file, *CALIBRATION, "-o")
        result = invoke(*arguments, model)
        assert (result.code, "is the source itself" in result.err) == (2, True)
        result = invoke(*arguments, model.parent)
        assert (result.code, f"the output {model.parent} exists" in result.err) == (2, True)
        assert "rm " not in result.err  # it may be anybody's
        assert invoke(*arguments, "/dev/null/x").code == 2
    assert sorted(model.iterdir()) == before


def test_dry_runs_show_needs_and_write_nothing(invoke: Any, model: Path) -> None:
    for command in ("calibrate", "quantize"):
        result = invoke(command, model, "-o", "out", *CALIBRATION, "--dry-run", "--json")
        assert result.code == 0, result.err
        assert result.document["output"] == "out"
        assert "memory" in invoke(command, model, *CALIBRATION, "--dry-run").out
        beyond = invoke(command, model, "--samples", 1, "--seq", 129, "--dry-run")
        assert (beyond.code, "longer than the model's 128 positions" in beyond.err) == (2, True)
    assert list(Path().iterdir()) == []
    assert "self_attn.q_proj" in invoke("quantize", model, *CALIBRATION, "--dry-run", "--device", "cpu").out


def test_verify_and_inspect(invoke: Any, packed: Path, model: Path) -> None:
    assert invoke("verify").out == f"{packed}: intact\n"
    assert invoke("verify", packed, "--json").document["is_intact"] is True
    shown = invoke("inspect", packed, "--layers")
    assert "model.layers.1.mlp.down_proj" in shown.out
    document = invoke("inspect", "--json").document
    assert document["schema"] == "w4a4.checkpoint"
    assert document["weight_bits"] == 4
    source = invoke("inspect", model, "--json").document
    assert source["schema"] == "w4a4.model"
    assert source["linears"]["mlp.up_proj"] == [192, 128]
    assert "llama, 2 layers" in invoke("inspect", model, "--layers").out

    shard = next(packed.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = invoke("verify", packed)
    assert result.code == 5
    assert shard.name in result.out
    assert "fault" in result.err


def test_eval_compares_with_the_source(invoke: Any, packed: Path, model: Path, text_file: Path) -> None:
    arguments = ("--data", text_file, "--seq", 32, "--json")
    document = invoke("eval", packed, "--source", model, *arguments).document
    assert document["act"] == "map"
    assert document["tokens_scored"] == document["windows"] * 31
    assert document["kl"] > 0
    source = invoke("eval", model, *arguments).document
    assert source["perplexity"] == pytest.approx(document["source_perplexity"], rel=1e-4)
    wide = invoke("eval", packed, "--act", "a8", "--kv", 16, *arguments).document
    assert (wide["act"], wide["kv_bits"]) == ("a8", 16)
    assert wide["perplexity"] != document["perplexity"]
    table = invoke("eval", packed, "--source", model, "--data", text_file, "--seq", 32)
    assert "top-1 agreement" in table.out
    assert invoke("eval", model, "--act", "a8", *arguments).code == 2
    assert invoke("eval", packed, "--data", text_file, "--seq", 4096).code == 2
    limited = invoke("eval", packed, "--fail-if-ppl-above", 1.01, *arguments)
    assert limited.code == 6
    assert limited.document["perplexity"] > 1.01


def test_generate_streams_text_and_is_repeatable(invoke: Any, packed: Path) -> None:
    document = invoke("generate", packed, "hello", "--max-tokens", 5, "--json").document
    assert (document["num_prompt_tokens"], document["num_output_tokens"]) == (5, 5)
    streamed = invoke("generate", "hello", "--max-tokens", 5)
    assert streamed.out == document["text"] + "\n"
    drawn = [invoke("generate", "hello", "--max-tokens", 5, "--temperature", 1, "--seed", 3).out for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert invoke("generate", packed, "hello", "--chat", "--max-tokens", 2).code == 0
    assert invoke("generate", packed, "").code == 2
    assert invoke("generate", packed, "a", "b").code == 2
    assert invoke("generate", "nowhere", "a").code == 3
    assert invoke("generate", packed, "hello", "--system", "x").code == 2
    assert invoke("generate", packed, "\ud800").code == 2  # what Python makes of an argument that is no UTF-8
    beyond = invoke("generate", packed, "hello", "--max-tokens", 1000)
    assert (beyond.code, "this model takes 128 of both together" in beyond.err) == (2, True)
    assert invoke("generate", packed, "hello", "--json").document["num_output_tokens"] <= 123


def test_numbers_and_memory_that_fail_while_generating(
    invoke: Any, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4a4.serve.model import CausalLM

    logits = CausalLM.logits
    monkeypatch.setattr(CausalLM, "logits", lambda model, hidden: logits(model, hidden) * float("nan"))
    failed = invoke("generate", packed, "hello", "--max-tokens", 4)
    assert failed.code == 6
    assert "the model's logits are not finite after 5 tokens" in failed.err

    def full(model: CausalLM, hidden: object) -> None:
        raise MemoryError

    monkeypatch.setattr(CausalLM, "logits", full)
    failed = invoke("generate", packed, "hello", "--max-tokens", 4)
    assert (failed.code, "out of memory" in failed.err) == (7, True)


def test_sampling_defaults_of_the_model(invoke: Any, packed: Path) -> None:
    def text(*options: object) -> str:
        result = invoke("generate", packed, "hello", "--max-tokens", 8, "--json", *options)
        return str(result.document["text"])

    greedy = text()
    file = packed / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"temperature": 1.5, "top_k": 50}))
    said = invoke("generate", packed, "hello", "--max-tokens", 2).err
    assert "from generation_config.json: temperature 1.5, top_k 50" in said
    assert text("--seed", 1) != greedy
    assert text("--seed", 1) == text("--seed", 1)
    assert text("--temperature", 0) == text("--top-k", 1) == text("--generation-config", "none") == greedy


def test_commands_without_a_model_say_what_to_type(invoke: Any) -> None:
    for arguments in (
        ["bench", "--device", "cpu"],
        ["serve"],
        ["eval"],
        ["verify"],
        ["inspect"],
        ["compile"],
        ["generate", "hello"],
    ):
        result = invoke(*arguments)
        assert result.code == 3, arguments
        assert "w4a4 quantize smollm2-135m" in result.err


def test_sizes_that_cannot_be_packed_are_refused_before_calibrating(invoke: Any, model_folder: ModelFolder) -> None:
    result = invoke("quantize", model_folder("llama", tokenizer=True))
    assert result.code == 4
    assert "head_dim 16" in result.err
    assert "calibrating" not in result.err


def test_unsupported_models_are_refused_before_anything_is_done(invoke: Any, tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    for command in ("calibrate", "quantize", "inspect", "eval"):
        result = invoke(command, folder)
        assert result.code == 4, command
        assert "mixture of experts" in result.err
        assert "supported: Llama" in result.err


def test_serve_explains_and_answers(invoke: Any, packed: Path) -> None:
    explained = invoke("serve", packed, "--explain", "--json").document
    assert {line["kernel"] for line in explained["linears"]} == {"reference-cpu"}
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from w4a4.cli.main import main; main()", "serve", str(packed), "--port", "0"]
    process = subprocess.Popen([*command, "--json"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        document = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        body = json.dumps({"model": document["model"], "prompt": "hello", "max_tokens": 3, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{document['url']}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            completion = json.loads(answer.read())
        assert completion["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def test_compile_lists_the_kernels_of_a_checkpoint(invoke: Any, packed: Path) -> None:
    document = invoke("compile", packed, "--dry-run", "--json").document
    assert document["arch"] == "sm_90a"
    assert len(document["kernels"]) == len(set(document["kernels"]))
    assert any(name.startswith("quantize-silu-192-a8") for name in document["kernels"])
    cache = sorted(name.rsplit("-bb", 1)[0] for name in document["kernels"] if name.startswith("kv4"))
    assert cache == [
        "kv4-decode-d64-g2-p16-s0-w4",  # blocks of 4 warps, and of 8 for few long kv-heads
        "kv4-decode-d64-g2-p16-s0-w8",
        "kv4-write-d64-p16-b16-s0",  # the cache at 16 bits
        "kv4-write-d64-p16-b4-s0",
    ]
