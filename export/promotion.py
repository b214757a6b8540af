"""Spend a recipe's budget of 8-bit MACs where 4 bits hurt the output most.

A first pass through the float layers, on a few sequences, measures for every stage (linears that read one input) the
relative output error of its rounded activations and weights. `dual` promotes whole stages with what its segments leave
of the budget; `fmpq-int8` spends all of it block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF, LayerMath
from w4a4.calibrate.precision_map import block_size_of, promote, spend
from w4a4.calibrate.statistics import token_weights
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.layer_quantizer import STAGES, fake_quantize, round_weight, stored_inputs
from w4a4.export.plan import LayerPlan, eight_bit_macs

PROBE_TOKENS = 256
PreparedLayer = tuple[dict[str, Tensor], LayerPlan]


def promotions(
    config: ModelConfig,
    recipe: Recipe,
    prepared: Callable[[int], PreparedLayer],
    hidden: Tensor,
    device: torch.device | str = "cpu",
) -> dict[int, list[str]]:
    """Which stages to promote: layer -> names of the linears, within `recipe.budget` of all MACs.

    Args:
        prepared: a layer's transformed float weights and its plan before any promotion.
        hidden: residual stream f32 [sequences, T, H] of the embedding, transformed; consumed.
    """
    gains: dict[str, float] = {}
    macs: dict[str, int] = {}
    high = total = 0
    for layer, weights, plan, inputs in _layers(config, prepared, hidden, device):
        layer_high, layer_total = eight_bit_macs(plan)
        high, total = high + layer_high, total + layer_total
        for stage in STAGES:
            key = f"{layer:05d}.{stage[0]}"
            gains[key] = _output_error(stage, weights, plan, inputs[INPUT_OF[stage[0]]])
            macs[key] = sum(
                plan[name].layout.out_features * segment.width
                for name in stage
                for segment in plan[name].layout.segments
                if segment.act_bits == 4
            )
    chosen = promote(gains, macs, int(recipe.budget * total) - high)
    result: dict[int, list[str]] = {}
    for key in chosen:
        layer, first = int(key[:5]), key[6:]
        result.setdefault(layer, []).extend(next(stage for stage in STAGES if stage[0] == first))
    return result


def block_widths(
    config: ModelConfig,
    recipe: Recipe,
    prepared: Callable[[int], PreparedLayer],
    hidden: Tensor,
    device: torch.device | str = "cpu",
) -> Tensor:
    """How many channels of every stage run at 8 bits, int64 [layers, stages]: whole blocks, the strongest channels.

    Block by block the budget goes to the stage whose relative output error falls most per MAC. Tokens of massive norm
    are weighted down as in GPTQ. Arguments as of `promotions`; the plan's channels are in ascending order of
    magnitude, all at 4 bits.
    """
    errors: list[list[float]] = []  # per layer and stage: with 0, 1, 2, ... blocks at 8 bits
    costs: list[int] = []
    sizes: list[int] = []
    total = 0
    for _, weights, plan, inputs in _layers(config, prepared, hidden, device):
        total += eight_bit_macs(plan)[1]
        for stage in STAGES:
            layout = plan[stage[0]].layout
            size = block_size_of(layout.in_features)
            x = inputs[INPUT_OF[stage[0]]]
            x = x * token_weights(x).sqrt()[:, None]
            widths = range(0, layout.in_features + 1, size)
            errors.append(
                [
                    _output_error(stage, weights, {n: plan[n].promoted(w, recipe.high_weight_bits) for n in stage}, x)
                    for w in widths
                ]
            )
            costs.append(size * sum(plan[name].layout.out_features for name in stage))
            sizes.append(size)
    blocks = spend(errors, costs, int(recipe.budget * total))
    return (torch.tensor(blocks) * torch.tensor(sizes)).view(config.num_layers, len(STAGES))


def _layers(
    config: ModelConfig, prepared: Callable[[int], PreparedLayer], hidden: Tensor, device: torch.device | str
) -> Iterator[tuple[int, dict[str, Tensor], LayerPlan, dict[str, Tensor]]]:
    """Every layer's index, weights, plan and a sample [<= 2 PROBE_TOKENS, K] of what its linears read."""
    for layer in range(config.num_layers):
        weights, plan = prepared(layer)
        inputs: dict[str, Tensor] = {}

        def observe(point: str, x: Tensor, inputs: dict[str, Tensor] = inputs) -> None:
            flat = x.flatten(0, -2)
            inputs[point] = flat[:: max(1, flat.shape[0] // PROBE_TOKENS)]

        math = LayerMath(config, layer, hidden.shape[1], device)
        hidden = math.forward(weights, hidden.to(device), observe)
        yield layer, weights, plan, inputs


def _output_error(stage: tuple[str, ...], weights: dict[str, Tensor], plan: LayerPlan, x: Tensor) -> float:
    """E‖y_q − y‖² / E‖y‖² of a stage with its activations and (to nearest) its weights rounded."""
    layout = plan[stage[0]].layout
    stored = stored_inputs(x, plan[stage[0]]).float()
    weight = torch.cat([plan[name].stored(weights[name + ".weight"]) for name in stage])
    exact = stored @ weight.T
    rounded = fake_quantize(stored, layout) @ round_weight(weight, layout).T
    energy = float(exact.square().sum())
    return float((rounded - exact).square().sum()) / energy if energy else 0.0
