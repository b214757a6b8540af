"""Tiny random models, quantised for real: calibrated on random tokens and written by the pipeline that users run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from w4a4.calibrate.source import open_source
from w4a4.calibrate.statistics import CalibrationRun, collect
from w4a4.configs.recipe import load_recipe
from w4a4.export.pipeline import quantize

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.06,
}
"""Room for two precisions in front of every linear, and heads as wide as KV pages have them (64)."""

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
}


def write_source(folder: Path, kind: str) -> None:
    """A random float32 model of that kind, its gains and biases random as well, with a byte tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **KINDS[kind]}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
    model.save_pretrained(folder)


def write_packed(folder: Path, kind: str, recipe: str, **overrides: Any) -> Path:
    """Write `folder`/source and quantise it to the folder that is returned."""
    write_source(folder / "source", kind)
    source = open_source(str(folder / "source"))
    tokens = torch.randint(0, SIZES["vocab_size"], (4, 64), generator=torch.Generator().manual_seed(2))
    run = CalibrationRun(source.identity.name, source.identity.sha256, "random", 4, 64, 2, "")
    stats = collect(source, run, tokens)
    return quantize(source, stats, load_recipe(recipe, overrides), folder / "packed")
