"""Spend a recipe's budget of 8-bit MACs where 4 bits hurt the output most.

A first pass through the float layers, on a few sequences, measures for every stage (linears that read one input) what
rounding its activations and weights leaves in the residual stream, and the budget is spent block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.decoder import LayerMath
from w4a4.calibrate.precision_map import block_size_of, spend
from w4a4.calibrate.statistics import token_weights
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.layer_quantizer import STAGES, fake_quantize, round_weight, stored_inputs
from w4a4.export.plan import LayerPlan, eight_bit_macs

PROBE_TOKENS = 256
MAX_STEPS = 16  # in which a stage's channels can go to 8 bits
PreparedLayer = tuple[dict[str, Tensor], LayerPlan]


def block_widths(
    config: ModelConfig,
    recipe: Recipe,
    prepared: Callable[[int], PreparedLayer],
    hidden: Tensor,
    device: torch.device | str = "cpu",
) -> Tensor:
    """How many channels of every stage run at 8 bits, int64 [layers, stages]: whole blocks, the strongest channels.

    The budget goes block by block to the stage whose error falls most per MAC: the error that its rounding leaves in
    the residual stream, relative to the stream, tokens of massive norm weighted down as in GPTQ.

    Args:
        prepared: a layer's transformed float weights and its plan: channels in ascending order of what they contribute,
            all at 4 bits.
        hidden: residual stream f32 [sequences, T, H] of the embedding, transformed.
    """
    errors: list[list[float]] = []  # per layer and stage: with 0, 1, 2, ... steps at 8 bits
    costs: list[int] = []
    steps: list[int] = []  # channels
    total = 0
    hidden = hidden[:, :PROBE_TOKENS].to(device)
    for layer in range(config.num_layers):
        weights, plan = prepared(layer)
        total += eight_bit_macs(plan)[1]
        paths, hidden = _paths(LayerMath(config, layer, hidden.shape[1], device), weights, hidden)
        for stage, path in zip(STAGES, paths, strict=True):
            width = plan[stage[0]].layout.in_features
            size = block_size_of(width)
            steps.append(size * -(-width // (size * MAX_STEPS)))
            levels = [*range(0, width, steps[-1]), width]
            errors.append(
                [path.error({n: plan[n].promoted(w, recipe.high_weight_bits) for n in stage}) for w in levels]
            )
            costs.append(steps[-1] * sum(plan[name].layout.out_features for name in stage))
    blocks = spend(errors, costs, int(recipe.budget * total))
    widths = torch.tensor([shapes for _ in range(config.num_layers) for shapes in _input_widths(config)])
    return torch.minimum(torch.tensor(blocks) * torch.tensor(steps), widths).view(config.num_layers, len(STAGES))


def _input_widths(config: ModelConfig) -> list[int]:
    shapes = config.linear_shapes()
    return [shapes[stage[0]][1] for stage in STAGES]


@dataclass(frozen=True)
class _Path:
    """How the rounding of one stage reaches the residual stream."""

    stage: tuple[str, ...]
    weights: dict[str, Tensor]
    inputs: Tensor  # [B, T, K], in the model's order
    update: Callable[[Tensor], Tensor]  # output of the stage [B, T, N] -> update of the stream [B, T, H]
    exact: Tensor  # that update without rounding
    stream: Tensor  # the residual stream after it [B, T, H]

    def error(self, plan: LayerPlan) -> float:
        """Sum over tokens of w ‖update − exact‖² / sum of w ‖stream‖², w of the stream's norm."""
        first = plan[self.stage[0]]
        weight = torch.cat([plan[name].stored(self.weights[name + ".weight"]) for name in self.stage])
        stored = fake_quantize(stored_inputs(self.inputs, first).flatten(0, 1).float(), first.layout)
        output = stored @ round_weight(weight, first.layout).T
        wrong = self.update(output.view(*self.inputs.shape[:2], -1)) - self.exact
        importance = torch.stack([token_weights(sequence) for sequence in self.stream])
        energy = float((self.stream.square().sum(-1) * importance).sum())
        return float((wrong.square().sum(-1) * importance).sum()) / energy if energy else 0.0


def _paths(math: LayerMath, weights: dict[str, Tensor], x: Tensor) -> tuple[list[_Path], Tensor]:
    """The four stages of a layer on the residual stream x [B, T, H], and the stream after the layer."""

    def linear(stage: tuple[str, ...], inputs: Tensor) -> Tensor:
        return torch.cat([F.linear(inputs, weights[n + ".weight"]) for n in stage], -1)

    def biased(stage: tuple[str, ...], output: Tensor) -> list[Tensor]:
        parts = torch.split(output, [weights[n + ".weight"].shape[0] for n in stage], -1)
        return [part + weights.get(n + ".bias", 0) for n, part in zip(stage, parts, strict=True)]

    def attended(output: Tensor) -> Tensor:
        return math.attend(*math.heads(weights, *biased(STAGES[0], output)))

    def inner(output: Tensor) -> Tensor:
        gate, up = biased(STAGES[2], output)
        return F.silu(gate) * up

    paths = []
    for norm, read, write, middle in (
        ("input_layernorm", STAGES[0], STAGES[1], attended),
        ("post_attention_layernorm", STAGES[2], STAGES[3], inner),
    ):
        inputs = math.norm(x) * weights[f"{norm}.weight"]
        between = middle(linear(read, inputs))
        exact = linear(write, between)
        x = x + biased(write, exact)[0]

        def update(
            output: Tensor, write: tuple[str, ...] = write, middle: Callable[[Tensor], Tensor] = middle
        ) -> Tensor:
            return linear(write, middle(output))

        paths.append(_Path(read, weights, inputs, update, exact, x))
        paths.append(_Path(write, weights, between, lambda output: output, exact, x))
    return paths, x
