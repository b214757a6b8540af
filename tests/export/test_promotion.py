from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from w4a4.calibrate.decoder import LayerMath
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import load_recipe
from w4a4.export.layer_quantizer import STAGES, round_weight
from w4a4.export.plan import LayerPlan, LinearPlan, eight_bit_macs
from w4a4.export.promotion import PreparedLayer, promotions
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import block_hadamard, quantize_activation

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)
LOUD = {(1, "mlp.gate_proj"), (2, "self_attn.o_proj")}
"""Stages made hard to round: a few columns of their weights dwarf the rest, unlike their inputs."""


def layer_of(index: int) -> tuple[dict[str, Tensor], LayerPlan]:
    generator = torch.Generator().manual_seed(index)
    weights: dict[str, Tensor] = {}
    plan: dict[str, LinearPlan] = {}
    for name, (rows, columns) in CONFIG.linear_shapes().items():
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        if (index, name) in LOUD:
            weight[:, :3] *= 25
        weights[f"{name}.weight"] = weight
        segments = (Segment(columns - 64, 4, 4), Segment(64, 8, 8)) if name == "mlp.down_proj" else None
        layout = LinearLayout(rows, segments or (Segment(columns, 4, 4),), hadamard=1 + 63 * (name == "mlp.down_proj"))
        plan[name] = LinearPlan(layout, torch.arange(127, -1, -1) if name == "self_attn.o_proj" else None)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{norm}.weight"] = torch.ones(128)
    return weights, plan


def hidden() -> Tensor:
    return torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(9))


def promoted(budget: float, prepared: Callable[[int], PreparedLayer] = layer_of) -> dict[int, list[str]]:
    with torch.inference_mode():
        return promotions(CONFIG, load_recipe("dual", {"budget": budget}), prepared, hidden())


def brute_force_errors() -> dict[tuple[int, tuple[str, ...]], float]:
    """Relative output error of every stage on the float model, from the codes of activations and weights."""
    x = hidden()
    errors: dict[tuple[int, tuple[str, ...]], float] = {}
    for layer in range(CONFIG.num_layers):
        weights, plan = layer_of(layer)
        seen: dict[str, Tensor] = {}
        x = LayerMath(CONFIG, layer, 40).forward(
            weights, x, lambda point, value, seen=seen: seen.update({point: value})
        )
        for stage, point in zip(STAGES, ("attn_in", "attn_out", "mlp_in", "mlp_hidden"), strict=True):
            inputs = seen[point].flatten(0, 1)
            wrong = energy = 0.0
            for name in stage:
                linear, weight = plan[name], weights[f"{name}.weight"]
                layout = linear.layout
                activation = quantize_activation(inputs, layout, linear.perm)
                values = activation.codes.float().split([s.width for s in layout.segments], 1)
                x_hat = torch.cat([v * activation.scales[:, i, None] for i, v in enumerate(values)], 1)
                stored = weight if linear.perm is None else weight[:, linear.perm]
                w_hat = round_weight(block_hadamard(stored, layout.hadamard), layout)
                exact = inputs @ weight.T
                wrong += float((x_hat @ w_hat.T - exact).square().sum())
                energy += float(exact.square().sum())
            errors[layer, stage] = wrong / energy
    return errors


def macs_of(chosen: dict[int, list[str]]) -> tuple[int, int]:
    """8-bit and all MACs of the model after the promotions."""
    high = total = 0
    for layer in range(CONFIG.num_layers):
        _, plan = layer_of(layer)
        part, every = eight_bit_macs({n: p.promoted() if n in chosen.get(layer, ()) else p for n, p in plan.items()})
        high, total = high + part, total + every
    return high, total


def stages_of(chosen: dict[int, list[str]]) -> set[tuple[int, tuple[str, ...]]]:
    found = {(layer, stage) for layer, names in chosen.items() for stage in STAGES if stage[0] in names}
    assert sorted(name for names in chosen.values() for name in names) == sorted(
        name for _, stage in found for name in stage
    )  # whole stages and nothing else
    return found


def test_the_largest_errors_per_mac_go_first_while_they_fit() -> None:
    errors = brute_force_errors()
    initial, total = macs_of({})
    costs = {}
    for layer, stage in errors:
        cost = macs_of({layer: list(stage)})[0] - initial
        costs[layer, stage] = cost
    ranked = sorted(errors, key=lambda key: -errors[key] / costs[key])
    assert {(layer, stage[0]) for layer, stage in sorted(errors, key=lambda key: -errors[key])[:2]} == LOUD
    for budget in (0.15, 0.25, 0.4, 0.6, 0.9):
        expected, left = set(), int(budget * total) - initial
        for key in ranked:
            if costs[key] <= left:
                expected.add(key)
                left -= costs[key]
        assert stages_of(promoted(budget)) == expected
        assert expected


@pytest.mark.parametrize("budget", [0.12, 0.2, 0.33, 0.5, 0.75])
def test_the_budget_holds(budget: float) -> None:
    high, total = macs_of(promoted(budget))
    assert high <= budget * total
    cheapest = min(
        macs_of({layer: list(stage)})[0] - macs_of({})[0] for layer in range(CONFIG.num_layers) for stage in STAGES
    )
    assert budget * total - high < 8 * cheapest  # most of it is spent


def test_the_ends_of_the_budget() -> None:
    initial, total = macs_of({})
    assert promoted(initial / total) == {}
    assert promoted(0.0) == {}  # less than what is at 8 bits already: nothing is promoted, nothing taken back
    assert stages_of(promoted(1.0)) == {(layer, stage) for layer in range(3) for stage in STAGES}


def test_layers_are_prepared_once_and_in_order() -> None:
    asked: list[int] = []

    def prepared(layer: int) -> PreparedLayer:
        asked.append(layer)
        return layer_of(layer)

    promoted(0.5, prepared)
    assert asked == [0, 1, 2]


def test_a_stage_that_is_wholly_at_8_bits_is_not_promoted_again() -> None:
    def prepared(layer: int) -> PreparedLayer:
        weights, plan = layer_of(layer)
        return weights, {n: p.promoted() if n == "mlp.down_proj" else p for n, p in plan.items()}

    assert all("mlp.down_proj" not in names for names in promoted(1.0, prepared).values())
