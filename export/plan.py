"""What is decided about a layer before anything is rounded: per linear, the order and the precision of its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from w4a4.configs.architecture import ModelConfig, refuse_unpackable
from w4a4.configs.errors import UsageError
from w4a4.configs.recipe import Recipe
from w4a4.export.tensor_parallel import choose_tp_max
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import block_hadamard


@dataclass(frozen=True)
class LinearPlan:
    """Precision and order of one linear's input channels.

    perm: int64 [K] or None (identity): stored channel j reads input channel perm[j].
    """

    layout: LinearLayout
    perm: Tensor | None = None

    def stored(self, weight: Tensor) -> Tensor:
        """A weight [N, K] in the order and basis in which it is stored: columns permuted, online Hadamard undone.

        y = W x = (W P H)(H Pᵀ x), and H is its own inverse.
        """
        if self.perm is not None:
            weight = weight.index_select(1, self.perm.to(weight.device))
        return block_hadamard(weight, self.layout.hadamard)

    def promoted(self, channels: int | None = None, weight_bits: int = 8) -> LinearPlan:
        """The same linear, its last `channels` (all if None) at 8-bit activations and `weight_bits`, the rest at 4."""
        width = self.layout.in_features
        high = width if channels is None else channels
        parts = ((width - high, 4, 4), (high, 8, weight_bits))
        segments = tuple(Segment(*part) for part in parts if part[0])
        return replace(self, layout=replace(self.layout, segments=segments))


LayerPlan = Mapping[str, LinearPlan]
"""By short name, "self_attn.q_proj"."""


def fit_recipe(recipe: Recipe, config: ModelConfig) -> Recipe:
    """`recipe` for a model of shape `config`: the Hadamard before down_proj is the largest that divides its input, and
    `tp_max` is chosen.

    Raises:
        UnsupportedError: sizes that a packed model cannot run with.
        UsageError: a group size that does not divide every input, or more ranks than the model allows.
    """
    refuse_unpackable(config)
    for name, (_, width) in config.linear_shapes().items():
        if recipe.group_size and width % recipe.group_size:
            raise UsageError(
                f"recipe {recipe.name}: group_size {recipe.group_size} does not divide the {width} inputs of {name}",
                "set group_size: 64, or 0 for one scale per row",
            )
    fitted = replace(recipe, down_hadamard=math.gcd(recipe.down_hadamard, config.intermediate_size))
    return replace(fitted, tp_max=choose_tp_max(config, fitted))


def make_layout(
    out_features: int, segments: list[tuple[int, int, int]], recipe: Recipe, hadamard: int = 1
) -> LinearLayout:
    """A layout from (width, activation bits, weight bits) triples, empty segments left out."""
    kept = tuple(Segment(*segment) for segment in segments if segment[0])
    return LinearLayout(
        out_features, kept, symmetric=recipe.act_symmetric, group_size=recipe.group_size, hadamard=hadamard
    )


def eight_bit_macs(plan: LayerPlan) -> tuple[int, int]:
    """MACs per token of a layer with 8-bit (or wider) activations, and all of them."""
    high = sum(
        linear.layout.out_features * segment.width
        for linear in plan.values()
        for segment in linear.layout.segments
        if segment.act_bits > 4
    )
    return high, sum(linear.layout.out_features * linear.layout.in_features for linear in plan.values())
