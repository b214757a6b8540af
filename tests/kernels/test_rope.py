from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from w4a4.kernels.rope import apply_rope, rope_frequencies, rope_tables

HEAD_DIM = 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3.2": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "llama3-short": {**LLAMA3, "original_max_position_embeddings": 256},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 0.8,
    },
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn-of-one": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
}


def llama_config(scaling: dict[str, Any], theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": theta},
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str, theta: float) -> None:
    scaling = SCALINGS[name]
    config = llama_config(scaling, theta)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=128)
    frequencies, own_factor = rope_frequencies(HEAD_DIM, theta, scaling, 8192)
    assert torch.equal(frequencies, expected)
    assert own_factor == pytest.approx(factor, rel=1e-12)


def test_scalings_differ_from_the_default() -> None:
    plain, _ = rope_frequencies(HEAD_DIM, 10000.0, None, 8192)
    for name, scaling in SCALINGS.items():
        frequencies, factor = rope_frequencies(HEAD_DIM, 10000.0, scaling, 8192)
        is_same = factor == 1 and torch.equal(frequencies, plain)
        assert is_same == (name == "dynamic"), name


@pytest.mark.parametrize("name", ["default", *SCALINGS])
def test_rotation_equals_transformers(name: str) -> None:
    scaling = SCALINGS.get(name, {})
    rotary = LlamaRotaryEmbedding(llama_config(scaling, 10000.0))
    positions = torch.tensor([0, 1, 2, 77, 1000, 8000])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, HEAD_DIM, generator=generator)
    k = torch.randn(6, 2, HEAD_DIM, generator=generator)
    cos, sin = rotary(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    cos, sin = rope_tables(positions, *rope_frequencies(HEAD_DIM, 10000.0, scaling, 8192))
    assert torch.equal(apply_rope(q, cos, sin), expected_q[0].transpose(0, 1))
    assert torch.equal(apply_rope(k, cos, sin), expected_k[0].transpose(0, 1))


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=generator).double()

    def score(query: int, key: int) -> float:
        cos, sin = rope_tables(torch.tensor([query, key]), *rope_frequencies(HEAD_DIM, 10000.0, None, 8192))
        return float((apply_rope(q, cos[:1], sin[:1]) * apply_rope(k, cos[1:], sin[1:])).sum())

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_leading_axes_broadcast() -> None:
    x = torch.randn(3, 5, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.arange(5), *rope_frequencies(HEAD_DIM, 10000.0, None, 8192))
    rotated = apply_rope(x, cos, sin)
    assert torch.equal(rotated, torch.stack([apply_rope(row, cos, sin) for row in x]))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="longrope.*default, linear, dynamic, llama3, yarn"):
        rope_frequencies(HEAD_DIM, 10000.0, {"rope_type": "longrope"}, 8192)
