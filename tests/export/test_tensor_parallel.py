"""How many ranks a checkpoint allows, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import UnsupportedError, UsageError
from w4a4.configs.recipe import load_recipe
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.plan import fit_recipe
from w4a4.export.tensor_parallel import explain_tp_max, tp_limits
from w4a4.serve.integrations.vllm.ranks import refuse_uncuttable


def model(heads: int, kv_heads: int, head_dim: int, inner: int) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 300,
            "hidden_size": heads * head_dim,
            "intermediate_size": inner,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
    )


SMOLLM2, QWEN, LLAMA3_8B, LLAMA3_70B = (
    model(9, 3, 64, 1536), model(14, 2, 64, 4864), model(32, 8, 128, 14336), model(64, 8, 128, 28672),
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "recipe", "expected"),
    [
        (SMOLLM2, "dual", 1),
        (QWEN, "dual", 2),
        (LLAMA3_8B, "dual", 8),
        (LLAMA3_70B, "dual", 8),
        (LLAMA3_8B, "w4a16", 8),
        (LLAMA3_8B, "fmpq", 1),
        (LLAMA3_8B, "quik", 1),
        (LLAMA3_8B, "fmpq-int8", 8),
        (model(32, 8, 128, 11008), "dual", 2),  # 11,008 = 86 blocks of 128
        (model(8, 1, 128, 4096), "dual", 8),  # one kv-head stands on every rank
    ],
)
def test_default_is_the_most_that_cost_nothing(config: ModelConfig, recipe: str, expected: int) -> None:
    assert fit_recipe(load_recipe(recipe), config).tp_max == expected


def test_the_line_says_what_limits() -> None:
    def line(config: ModelConfig, recipe: str, **overrides: Any) -> str:
        asked = load_recipe(recipe, overrides)
        return explain_tp_max(config, asked, fit_recipe(asked, config))

    assert line(LLAMA3_8B, "dual") == "tensor parallelism with scales per rank: up to 8 ranks"
    assert line(QWEN, "dual", tp_max=1) == "tensor parallelism with scales per rank: up to 1 rank"
    assert line(QWEN, "dual") == (
        "tensor parallelism with scales per rank: up to 2 ranks; 4 is too many: 14 heads do not divide by 4; a slice "
        "of o_proj's 896 channels is no multiple of 64; a slice of down_proj's 4864 channels is no multiple of 128"
    )
    assert "--tp-max allows more by ordering channels inside slices" in line(LLAMA3_8B, "fmpq")


def test_more_than_the_model_allows() -> None:
    with pytest.raises(UsageError, match="tp_max 8: 14 heads do not divide by 8") as raised:
        fit_recipe(load_recipe("dual", {"tp_max": 8}), QWEN)
    assert raised.value.hint == "--tp-max 2"
    with pytest.raises(UsageError, match="tp_max is 3"):
        load_recipe("dual", {"tp_max": 3})
    unrotated = load_recipe("dual", {"value_hadamard": False})  # o_proj's channels are sorted, not its heads
    assert tp_limits(LLAMA3_8B, unrotated, 1) == []
    with pytest.raises(UsageError, match="o_proj's channels stand where magnitude"):
        fit_recipe(replace(unrotated, tp_max=2), LLAMA3_8B)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("dual", {"down_hadamard": 64}),
        ("rtn", {}),
        ("w4a16", {}),
        ("fmpq", {"tp_max": 2, "budget": 1.0}),
        ("quik", {"tp_max": 2, "down_bits": 0}),
    ],
)
def test_what_is_written_can_be_cut(recipe: str, overrides: dict[str, Any], quantized: Callable[..., Path]) -> None:
    """The reader's own check agrees with what the writer promised."""
    checkpoint = open_checkpoint(quantized("llama", recipe, **overrides))
    assert checkpoint.quantization["permutation"]["tp_max"] == 2
    refuse_uncuttable(checkpoint, 2, per_rank_scales=True)
    permuted = [name for name in checkpoint.names() if name.endswith(("o_proj.input_perm", "down_proj.input_perm"))]
    assert permuted or recipe in ("rtn", "w4a16")
    for name in permuted if "tp_max" in overrides else ():  # ranks get equal parts of every segment
        layout = checkpoint.layout(name.removesuffix(".input_perm"))
        assert len(layout.segments) == 2
        owners = checkpoint.tensor(name).long() // (layout.in_features // 2)
        for part in owners.split([segment.width for segment in layout.segments]):
            assert part.tolist() == sorted(part.tolist()) and int(part.sum()) * 2 == len(part)


def test_blocks_that_would_be_cut_are_refused_by_both(quantized: Callable[..., Path]) -> None:
    config = replace(LLAMA3_8B, num_layers=2)
    assert tp_limits(config, load_recipe("dual"), 3)
    checkpoint = open_checkpoint(quantized("llama", "dual"))
    assert checkpoint.quantization["permutation"]["tp_max"] == 1
    with pytest.raises(UnsupportedError, match="down_proj"):
        refuse_uncuttable(checkpoint, 2, per_rank_scales=True)
    refuse_uncuttable(checkpoint, 2)  # rows can be cut
