from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF
from w4a4.calibrate.statistics import CalibrationRun, CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import load_recipe
from w4a4.export.plan import LayerPlan
from w4a4.export.published import OUTLIER_THRESHOLD, IdentityTransform, published_layout
from w4a4.kernels.layout import Segment

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 1024,
        "intermediate_size": 1408,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
)
WIDTHS = {"attn_in": 1024, "attn_out": 576, "mlp_in": 1024, "mlp_hidden": 1408}


def statistics(magnitudes: dict[str, Tensor]) -> CalibrationStats:
    run = CalibrationRun("tiny", None, "words", 1, 8, 0, "")
    tensors = {f"layers.0.{point}.absmax": value for point, value in magnitudes.items()}
    return CalibrationStats(run, torch.zeros(1, 8, dtype=torch.int32), tensors)


def magnitudes() -> dict[str, Tensor]:
    """Between 1 and 2 everywhere, so that nothing is an outlier."""
    generator = torch.Generator().manual_seed(0)
    return {point: 1 + torch.rand(width, generator=generator) for point, width in WIDTHS.items()}


def plan_of(recipe: str, values: dict[str, Tensor], **overrides: Any) -> LayerPlan:
    transform = IdentityTransform(CONFIG, load_recipe(recipe, overrides), statistics(values))
    weights = {"input_layernorm.weight": torch.ones(4)}
    same, extra, plan = transform.layer(0, weights)
    assert same is weights and extra == {}
    return plan


def test_quik_keeps_the_columns_of_largest_magnitude() -> None:
    values = magnitudes()
    for point, channels in {"attn_in": [5, 700], "attn_out": [0, 575], "mlp_in": [1023]}.items():
        values[point][channels] = 40.0
    plan = plan_of("quik", values)
    for name, linear in plan.items():
        if name == "mlp.down_proj":
            assert linear.layout.segments == (Segment(1408, 8, 8),) and linear.perm is None
            continue
        magnitude = values[INPUT_OF[name]]
        base, outliers = linear.layout.segments
        # 1 / 16 of the columns, in whole blocks: 64 of 1,024 is one block of 128 at least, 36 of 576 is one of 64
        kept = {1024: 128, 576: 64}[len(magnitude)]
        assert (base.act_bits, base.weight_bits) == (4, 4)
        assert outliers == Segment(kept, 16, 16)
        assert linear.perm is not None
        chosen = magnitude[linear.perm[-kept:]]
        assert torch.equal(chosen.sort().values, magnitude.sort().values[-kept:])
        assert linear.perm.sort().values.tolist() == list(range(len(magnitude)))
        assert not linear.layout.symmetric
    assert {5, 700} <= set(plan["self_attn.q_proj"].perm[-128:].tolist())


@pytest.mark.parametrize("weight_bits", [4, 8])
def test_fmpq_puts_outliers_in_as_few_blocks_as_they_fill(weight_bits: int) -> None:
    values = magnitudes()
    loud = list(range(0, 1024, 8)) + [1]  # 129 outliers: two blocks of 128
    values["attn_in"][loud] = 2 * float(values["attn_in"].median()) * OUTLIER_THRESHOLD
    plan = plan_of("fmpq", values, budget=0.3, high_weight_bits=weight_bits)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert plan[name].layout.segments == (Segment(768, 4, 4), Segment(256, 8, weight_bits))
        assert set(loud) <= set(plan[name].perm[-256:].tolist())
    assert torch.equal(plan["self_attn.q_proj"].perm, plan["self_attn.v_proj"].perm)
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):  # nothing stands out there
        assert [segment.act_bits for segment in plan[name].layout.segments] == [4] and plan[name].perm is None


def test_fmpq_stops_at_its_budget() -> None:
    values = {point: torch.linspace(1, 100, width) ** 2 for point, width in WIDTHS.items()}
    assert (values["attn_in"] > OUTLIER_THRESHOLD * values["attn_in"].median()).sum() > 256
    plan = plan_of("fmpq", values, budget=0.2)
    high = {name: sum(s.width for s in linear.layout.segments if s.act_bits == 8) for name, linear in plan.items()}
    # a fifth of 8, 9 (of 64) and 11 blocks, rounded down
    expected = dict.fromkeys(high, 128) | {"self_attn.o_proj": 64, "mlp.down_proj": 256}
    assert high == expected
    for name, linear in plan.items():
        assert published_layout(name, CONFIG.linear_shapes()[name], load_recipe("fmpq")) == linear.layout
    everything = plan_of("fmpq", values, budget=0.0)
    assert all(linear.layout.segments[0].act_bits == 4 and linear.perm is None for linear in everything.values())


@pytest.mark.parametrize(
    ("recipe", "act_bits", "weight_bits", "group_size"), [("rtn", 4, 4, 0), ("w4a16", 16, 4, 64), ("w8a8", 8, 8, 0)]
)
def test_uniform_recipes_treat_all_channels_alike(
    recipe: str, act_bits: int, weight_bits: int, group_size: int
) -> None:
    for name, linear in plan_of(recipe, magnitudes()).items():
        rows, columns = CONFIG.linear_shapes()[name]
        assert linear.layout.segments == (Segment(columns, act_bits, weight_bits),)
        assert (linear.layout.out_features, linear.layout.group_size, linear.perm) == (rows, group_size, None)


def test_a_down_projection_apart() -> None:
    plan = plan_of("rtn", magnitudes(), down_bits=8)
    assert plan["mlp.down_proj"].layout.segments == (Segment(1408, 8, 8),)
    assert plan["mlp.up_proj"].layout.segments == (Segment(1024, 4, 4),)


def test_tables_pass_through() -> None:
    transform = IdentityTransform(CONFIG, load_recipe("rtn"), statistics({}))
    table, gain = torch.randn(3, 4), torch.randn(4)
    assert transform.embedding(table) is table
    assert transform.head(gain, table) == (gain, table)
