from __future__ import annotations

import json
from typing import Any

import pytest

from w4a4.configs.architecture import ModelConfig, refuse_unpackable, refuse_unsupported
from w4a4.configs.errors import CheckpointError, UnsupportedError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["llama", "llama-tied-biased", "llama3", "mistral", "qwen2", "qwen2-sliding", "qwen3"])
def test_tensor_shapes_are_those_transformers_makes(kind: str, model_folder: Any) -> None:
    from safetensors import safe_open

    folder = model_folder(kind)
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert config.tensor_shapes() == stored
    assert config.num_parameters == sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in stored.values())


def test_linear_shapes_come_in_order_of_use() -> None:
    shapes = ModelConfig.from_hf({**LLAMA, "head_dim": 32}).linear_shapes()
    assert list(shapes.items()) == [
        ("self_attn.q_proj", (128, 64)),
        ("self_attn.k_proj", (64, 64)),
        ("self_attn.v_proj", (64, 64)),
        ("self_attn.o_proj", (64, 128)),
        ("mlp.gate_proj", (96, 64)),
        ("mlp.up_proj", (96, 64)),
        ("mlp.down_proj", (64, 96)),
    ]


def test_rope_reads_the_same_from_transformers_4_and_5() -> None:
    old = ModelConfig.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}})
    new = ModelConfig.from_hf(
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}, "rope_scaling": None}
    )
    assert old == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == {"rope_type": "llama3", **LLAMA3_ROPE}


def test_plain_rope_has_no_scaling() -> None:
    config = ModelConfig.from_hf({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)
    assert ModelConfig.from_hf(LLAMA).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert ModelConfig.from_hf({**LLAMA, "architectures": None, **changes}).sliding_windows == windows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"model_type": None}, "None"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts"),
        ({"model_type": "llava", "vision_config": {"hidden_size": 3}}, "multimodal"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
    ],
)
def test_unsupported_models_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        ModelConfig.from_hf({**LLAMA, **changes})
    assert said in refused.value.message
    assert refused.value.exit_code == 4
    assert refused.value.hint


def test_float_weights_declared_as_no_quantisation_pass() -> None:
    refuse_unsupported({**LLAMA, "quantization_config": None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 15}, "even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"architectures": 5.5}, "architectures must be a list"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_configs_that_make_no_sense_are_corrupt(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sizes_that_can_be_packed(head_dim: int) -> None:
    sizes = {"head_dim": head_dim, "hidden_size": 576, "intermediate_size": 1536}
    refuse_unpackable(ModelConfig.from_hf({**LLAMA, **sizes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 80}, "head_dim 80 is not supported"),
        ({"head_dim": 32}, "head_dim 32 is not supported"),
        ({"hidden_size": 4000, "head_dim": 128}, "q_proj has an input width of 4000"),
        ({"intermediate_size": 11040, "head_dim": 128}, "down_proj has an input width of 11040"),
        ({"intermediate_size": 53248, "head_dim": 128}, "down_proj has an input width of 53248"),
    ],
)
def test_sizes_that_cannot_be_packed_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said) as refused:
        refuse_unpackable(ModelConfig.from_hf({**LLAMA, **changes}))
    assert refused.value.exit_code == 4
    assert "head_dim of 64, 128, 256" in refused.value.hint
