from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import UnsupportedError, UsageError
from w4a4.configs.recipe import load_recipe
from w4a4.export.plan import LinearPlan, eight_bit_macs, fit_recipe, make_layout
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import block_hadamard

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)


@pytest.mark.parametrize("has_perm", [False, True])
@pytest.mark.parametrize("hadamard", [1, 32])
def test_stored_weights_on_stored_inputs_give_the_same_product(has_perm: bool, hadamard: int) -> None:
    """W x = (W P H)(H Pᵀ x): what is stored undoes exactly what runs online, permutation first."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(5, 96, generator=generator), torch.randn(7, 96, generator=generator)
    perm = torch.randperm(96, generator=generator) if has_perm else None
    plan = LinearPlan(LinearLayout(5, (Segment(64, 4, 4), Segment(32, 8, 8)), hadamard=hadamard), perm)
    online = block_hadamard(x if perm is None else x[:, perm], hadamard)
    stored = plan.stored(weight)
    torch.testing.assert_close(online @ stored.T, x @ weight.T, rtol=1e-4, atol=1e-5)
    assert torch.equal(stored, weight) == (perm is None and hadamard == 1)


def test_promotion_keeps_order_and_transform() -> None:
    perm = torch.arange(95, -1, -1)
    layout = LinearLayout(5, (Segment(64, 4, 4), Segment(32, 8, 8)), clip=(0.9, 3.0), hadamard=32)
    promoted = LinearPlan(layout, perm).promoted()
    assert promoted.layout.segments == (Segment(96, 8, 8),)
    assert promoted.perm is perm
    assert (promoted.layout.hadamard, promoted.layout.out_features) == (32, 5)


def test_the_last_channels_alone_can_be_promoted() -> None:
    plan = LinearPlan(LinearLayout(5, (Segment(96, 4, 4),)), torch.arange(95, -1, -1))
    assert plan.promoted(32).layout.segments == (Segment(64, 4, 4), Segment(32, 8, 8))
    assert plan.promoted(32, weight_bits=4).layout.segments == (Segment(64, 4, 4), Segment(32, 8, 4))
    assert plan.promoted(96) == plan.promoted()
    assert plan.promoted(0).layout == plan.layout


def test_empty_segments_are_left_out() -> None:
    layout = make_layout(5, [(0, 4, 4), (64, 8, 4), (0, 16, 16)], load_recipe("quik"), hadamard=8)
    assert layout == LinearLayout(5, (Segment(64, 8, 4),), symmetric=False, hadamard=8)


def test_eight_bit_macs_count_rows_and_every_width_above_four() -> None:
    plan = {
        "a": LinearPlan(LinearLayout(10, (Segment(96, 4, 4), Segment(32, 8, 8)))),
        "b": LinearPlan(LinearLayout(3, (Segment(64, 8, 4),))),
        "c": LinearPlan(LinearLayout(7, (Segment(56, 4, 4), Segment(8, 16, 16)))),
    }
    assert eight_bit_macs(plan) == (10 * 32 + 3 * 64 + 7 * 8, 10 * 128 + 3 * 64 + 7 * 64)


@pytest.mark.parametrize(("width", "block"), [(384, 128), (192, 64), (4864, 128), (1536, 128)])
def test_the_hadamard_is_the_largest_that_divides(width: int, block: int) -> None:
    dual = load_recipe("dual")
    fitted = fit_recipe(dual, replace(CONFIG, intermediate_size=width))
    assert fitted == replace(dual, down_hadamard=block, tp_max=fitted.tp_max) and fitted.tp_max > 0
    assert fit_recipe(replace(dual, down_hadamard=32), replace(CONFIG, intermediate_size=width)).down_hadamard == 32


def test_no_hadamard_is_put_where_none_was_asked_for() -> None:
    for name in ("rtn", "quik", "fmpq", "w8a8"):
        fitted = fit_recipe(load_recipe(name), CONFIG)
        assert fitted == replace(load_recipe(name), tp_max=fitted.tp_max)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="head_dim 32"):
        fit_recipe(load_recipe("dual"), replace(CONFIG, head_dim=32))
    with pytest.raises(UsageError, match="group_size 96 does not divide the 128 inputs of self_attn.q_proj"):
        fit_recipe(load_recipe("w4a16", {"group_size": 96}), CONFIG)
