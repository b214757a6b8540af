from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.decoder import LayerMath
from w4a4.calibrate.precision_map import spend
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import load_recipe
from w4a4.export import promotion
from w4a4.export.layer_quantizer import STAGES, fake_quantize, round_weight, stored_inputs
from w4a4.export.plan import LayerPlan, LinearPlan
from w4a4.export.promotion import PreparedLayer, block_widths
from w4a4.kernels.layout import LinearLayout, Segment

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
LEVELS = {"self_attn.q_proj": (0, 128), "self_attn.o_proj": (0, 128), "mlp.gate_proj": (0, 128),
          "mlp.down_proj": (0, 64, 128, 192)}  # fmt: skip
"""How many channels of a stage, by its first linear, can run at 8 bits: blocks of 128, or 64 where 192 asks for it."""


def layer_of(index: int) -> tuple[dict[str, Tensor], LayerPlan]:
    generator = torch.Generator().manual_seed(index)
    weights: dict[str, Tensor] = {}
    plan: dict[str, LinearPlan] = {}
    for name, (rows, columns) in CONFIG.linear_shapes().items():
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        if (index, name) in LOUD:
            weight[:, :3] *= 25
        weights[f"{name}.weight"] = weight
        layout = LinearLayout(rows, (Segment(columns, 4, 4),), hadamard=1 + 63 * (name == "mlp.down_proj"))
        plan[name] = LinearPlan(layout, torch.arange(127, -1, -1) if name == "self_attn.o_proj" else None)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{norm}.weight"] = 0.5 + torch.rand(128, generator=generator)
    return weights, plan


def hidden() -> Tensor:
    return torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(9))


def widths(budget: float) -> Tensor:
    with torch.inference_mode():
        return block_widths(CONFIG, load_recipe("dual", {"budget": budget}), layer_of, hidden())


def stream(stage: tuple[str, ...], high: int | None, layer: int, x: Tensor) -> Tensor:
    """The residual stream after the half of the layer that `stage` is in, the stage rounded with `high` channels at 8
    bits, or not at all."""
    weights, plan = layer_of(layer)
    math = LayerMath(CONFIG, layer, x.shape[1])

    def linear(name: str, inputs: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        if name not in stage or high is None:
            return F.linear(inputs, weight)
        part = plan[name].promoted(high) if high else plan[name]
        stored = fake_quantize(stored_inputs(inputs, part).flatten(0, 1), part.layout)
        return (stored @ round_weight(part.stored(weight), part.layout).T).view(*inputs.shape[:2], -1)

    inputs = math.norm(x) * weights["input_layernorm.weight"]
    attended = math.attend(*math.heads(weights, *(linear(name, inputs) for name in STAGES[0])))
    x = x + linear("self_attn.o_proj", attended)
    if stage in STAGES[:2]:
        return x
    inputs = math.norm(x) * weights["post_attention_layernorm.weight"]
    return x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", inputs)) * linear("mlp.up_proj", inputs))


def brute_force() -> tuple[list[list[float]], list[int], int]:
    """Per layer and stage the error that it leaves in the stream at each of its levels and the MACs of one block, from
    a whole layer run again and again; and all MACs."""
    x, errors, costs, total = hidden(), [], [], 0
    for layer in range(CONFIG.num_layers):
        weights, plan = layer_of(layer)
        for stage in STAGES:
            exact = stream(stage, None, layer, x)
            wrong = [stream(stage, high, layer, x) - exact for high in LEVELS[stage[0]]]
            errors.append([float(part.square().sum() / exact.square().sum()) for part in wrong])
            rows = sum(plan[name].layout.out_features for name in stage)
            costs.append(rows * LEVELS[stage[0]][1])
            total += rows * LEVELS[stage[0]][-1]
        x = LayerMath(CONFIG, layer, x.shape[1]).forward(weights, x)
    return errors, costs, total


@pytest.mark.parametrize("budget", [0.12, 0.2, 0.33, 0.5, 0.75, 1.0])
def test_blocks_go_where_the_error_in_the_stream_falls_most_per_mac(budget: float) -> None:
    errors, costs, total = brute_force()
    blocks = torch.tensor(spend(errors, costs, int(budget * total))).view(CONFIG.num_layers, len(STAGES))
    sizes = torch.tensor([LEVELS[stage[0]][1] for stage in STAGES])
    expected = blocks * sizes
    assert torch.equal(widths(budget), expected)
    spent = int((expected.flatten() // sizes.repeat(CONFIG.num_layers) * torch.tensor(costs)).sum())
    assert spent <= budget * total
    assert budget * total - spent < max(costs)  # most of it is spent


def test_stages_that_are_hard_to_round_come_first() -> None:
    chosen = widths(0.25)
    for layer, name in LOUD:
        index = next(i for i, stage in enumerate(STAGES) if stage[0] == name)
        assert chosen[layer, index] == 128


def test_the_ends_of_the_budget() -> None:
    assert not widths(0.0).any()
    assert widths(1.0).tolist() == [[128, 128, 128, 192]] * CONFIG.num_layers


def test_layers_are_prepared_once_and_in_order() -> None:
    asked: list[int] = []

    def prepared(layer: int) -> PreparedLayer:
        asked.append(layer)
        return layer_of(layer)

    with torch.inference_mode():
        block_widths(CONFIG, load_recipe("dual"), prepared, hidden())
    assert asked == [0, 1, 2]


def test_only_the_first_tokens_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "PROBE_TOKENS", 8)
    few = widths(0.33)
    monkeypatch.setattr(promotion, "PROBE_TOKENS", 40)
    with torch.inference_mode():
        cut = block_widths(CONFIG, load_recipe("dual", {"budget": 0.33}), layer_of, hidden()[:, :8])
    assert torch.equal(few, cut)
