from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from w4a4.calibrate.decoder import INPUT_OF, FloatModel, LayerMath, layer_weights, lm_head_weight, run_layers
from w4a4.calibrate.source import Source, open_source
from w4a4.kernels.reference import rms_norm

ModelFolder = Callable[..., Path]

NUM_TOKENS = 48  # three times the windows of the sliding models
TOLERANCE = 1e-4
LARGE_WEIGHTS = {"initializer_range": 0.1}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied-biased-wide-heads": ("llama-tied-biased", {}),
    "llama-narrow-heads": ("llama", {"head_dim": 8}),
    "llama-epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "llama3": ("llama3", {}),
    "llama3-short": (
        "llama3",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-tuned": (
        "llama",
        {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 0.9}},
    ),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2-sliding", {}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN, "rope_theta": 1000000.0}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}


def random_tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 300, (rows, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def reference_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, model_folder: ModelFolder) -> None:
    kind, changes = MODELS[name]
    folder = model_folder(kind, **LARGE_WEIGHTS, **changes)
    tokens = random_tokens()
    expected = reference_logits(folder, tokens)
    logits = FloatModel(open_source(str(folder)))(tokens)
    assert logits.dtype == torch.float32
    assert float(expected.std()) > 0.3  # a model of zeros would agree with anything
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("changed", ["rope_scaling", "sliding_window", "rms_norm_eps", "rope_theta"])
def test_every_setting_moves_the_logits(changed: str, model_folder: ModelFolder) -> None:
    """The comparison above would notice a setting that the decoder ignores."""
    plain, values = {
        "rope_scaling": ("llama", {"rope_scaling": YARN}),
        "sliding_window": ("mistral", {"sliding_window": 8}),
        "rms_norm_eps": ("llama", {"rms_norm_eps": 0.1}),
        "rope_theta": ("llama", {"rope_theta": 500000.0}),
    }[changed]
    tokens = random_tokens(1)
    logits = [
        FloatModel(open_source(str(model_folder(plain, **LARGE_WEIGHTS, **change))))(tokens) for change in ({}, values)
    ]
    assert float((logits[0] - logits[1]).abs().max()) > 10 * TOLERANCE


@pytest.fixture
def source(model_folder: ModelFolder) -> Source:
    return open_source(str(model_folder("qwen3", **LARGE_WEIGHTS)))


def test_layer_by_layer_equals_the_model_in_memory(source: Source) -> None:
    tokens = random_tokens(3)
    layers, hidden = zip(*((layer, hidden.clone()) for layer, hidden in run_layers(source, tokens)), strict=True)
    assert layers == (0, 1)
    normed = rms_norm(hidden[-1], source.tensor("model.norm.weight"), source.config.rms_norm_eps)
    torch.testing.assert_close(normed @ lm_head_weight(source).T, FloatModel(source)(tokens), rtol=1e-5, atol=1e-5)


def test_observers_see_what_each_linear_reads(source: Source) -> None:
    """Each linear applied to its observed input gives the point that follows it."""
    seen: dict[str, list[Tensor]] = {}

    def observe(layer: int) -> Callable[[str, Tensor], None]:
        def watch(point: str, value: Tensor) -> None:
            if layer == 1:
                seen.setdefault(point, []).append(value)

        return watch

    tokens = random_tokens(2)
    residuals = [hidden.clone() for _, hidden in run_layers(source, tokens, observe)]
    points = {point: torch.cat(values) for point, values in seen.items()}
    assert set(INPUT_OF.values()) < set(points)
    weights = layer_weights(source, 1)

    def linear(name: str) -> Tensor:
        return points[INPUT_OF[name]] @ weights[name + ".weight"].T

    gain = weights["input_layernorm.weight"]
    torch.testing.assert_close(points["attn_in"], points["attn_norm"] * gain)
    math = LayerMath(source.config, 1, NUM_TOKENS)
    q, k, v = math.heads(weights, *(linear(f"self_attn.{name}_proj") for name in "qkv"))
    torch.testing.assert_close(q, points["query"])
    torch.testing.assert_close(k, points["key"])
    torch.testing.assert_close(v, points["value"])
    torch.testing.assert_close(math.attend(q, k, v), points["attn_out"])
    gate = torch.nn.functional.silu(linear("mlp.gate_proj"))
    torch.testing.assert_close(gate * linear("mlp.up_proj"), points["mlp_hidden"])
    middle = residuals[0] + linear("self_attn.o_proj")
    torch.testing.assert_close(math.norm(middle), points["mlp_norm"])
    torch.testing.assert_close(middle + linear("mlp.down_proj"), residuals[1])
