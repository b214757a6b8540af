"""A baseline is the packed model's function without quantised activations and cache."""

from __future__ import annotations

import pytest
import torch

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import UnsupportedError
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import quantize_activation, w4ax_gemm
from w4a4.serve.baselines import BaselineOps, baseline_model, dense_weight
from w4a4.serve.model import CausalLM
from w4a4.serve.random_weights import RandomLinear, RandomModel

CPU = torch.device("cpu")


def config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 200,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return ModelConfig.from_hf(values | changes)


@pytest.mark.parametrize("hadamard", [1, 64])
def test_dense_weight_undoes_order_and_transform(hadamard: int) -> None:
    generator = torch.Generator().manual_seed(1)
    layout = LinearLayout(24, (Segment(128, 16, 4), Segment(64, 16, 8)), hadamard=hadamard)
    weights = tuple(torch.randint(-8, 8, (24, s.width), generator=generator).to(torch.int8) for s in layout.segments)
    scales = torch.rand(24, 2, generator=generator) + 0.1
    perm = torch.randperm(192, generator=generator).int()
    linear = RandomLinear(layout, weights, scales, perm, None)
    x = torch.randn(5, 192, generator=generator)
    expected = w4ax_gemm(quantize_activation(x, layout, perm), weights, scales, layout)
    torch.testing.assert_close(x @ dense_weight(linear, CPU).T, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_equals_the_packed_model_without_quantised_activations(kind: str) -> None:
    """Of a model with biases, an order of heads and an online Hadamard; 16-bit keys differ by their Hadamard alone."""
    packed = RandomModel(config(model_type=kind), CPU, kv_bits=16)
    tokens = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(2))
    ours = CausalLM(packed, CPU, act="a16").score(tokens)
    theirs = baseline_model(packed, CPU, "bf16").score(tokens)
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 5e-3, f"relative error {error:.1e}"
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.97


def test_biases_of_fused_linears_stand_behind_each_other() -> None:
    packed = RandomModel(config(), CPU)
    parts = [packed.linear(f"model.layers.1.self_attn.{name}_proj") for name in "qkv"]
    fused = BaselineOps("bf16").fuse_linears(parts, CPU)
    assert fused.bias is not None
    torch.testing.assert_close(fused.bias, torch.cat([part.bias for part in parts if part.bias is not None]))
    assert fused.out_sizes == (256, 128, 128) and fused.weight.shape == (512, 256)
    assert fused.weight_bytes == 512 * 256 * 4


def test_fp8_is_refused_without_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="fp8 baseline needs a GPU"):
        baseline_model(RandomModel(config(), CPU), CPU, "fp8")
