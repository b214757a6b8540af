"""Plans of the recipes that leave the weights as they are: `rtn`, `quik`, `fmpq`, `fmpq-int8`, `w4a16`, `w8a8`."""

from __future__ import annotations

from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF
from w4a4.calibrate.permutation import magnitude_permutation
from w4a4.calibrate.precision_map import PrecisionMap, outlier_column_map, outlier_map, uniform_map
from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.plan import LayerPlan, LinearPlan, make_layout

OUTLIER_THRESHOLD = 2.0
"""FMPQ: a channel is an outlier if its absmax exceeds this many times the median channel's. COMET states the rule but
not the number; at 2 nearly every linear of a small model uses its whole budget of 8-bit blocks."""


class IdentityTransform:
    """No transform: embeddings, norms and weights pass through, statistics alone decide order and precision."""

    def __init__(self, config: ModelConfig, recipe: Recipe, stats: CalibrationStats) -> None:
        self.config, self.recipe, self.stats = config, recipe, stats

    def embedding(self, table: Tensor) -> Tensor:
        return table

    def head(self, gain: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return gain, head

    def layer(self, index: int, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], LayerPlan]:
        """Layer `index`: the weights as they are, no further tensors, and the plan."""
        plan: dict[str, LinearPlan] = {}
        for name, (rows, columns) in self.config.linear_shapes().items():
            magnitude = self.stats.channel(index, INPUT_OF[name], "absmax")
            precision, weight_bits = self._precision(name, columns, magnitude)
            segments = [
                (precision.width(4), 4, self.recipe.weight_bits),
                (precision.width(8), 8, weight_bits),
                (precision.width(16), 16, self.recipe.weight_bits if self.recipe.act_bits == 16 else 16),
            ]
            perm = None
            if len(precision.widths) > 1:
                perm = magnitude_permutation(magnitude, precision.widths).order.long()
            plan[name] = LinearPlan(make_layout(rows, segments, self.recipe), perm)
        return weights, {}, plan

    def _precision(self, name: str, columns: int, magnitude: Tensor) -> tuple[PrecisionMap, int]:
        """Activation bits per block, and the weight bits where activations have 8."""
        recipe = self.recipe
        if recipe.down_bits and name == "mlp.down_proj":
            return uniform_map(columns, recipe.down_bits), recipe.down_bits
        if recipe.method == "outlier_columns":
            return outlier_column_map(columns, round(recipe.outlier_share * columns), recipe.act_bits), 8
        if recipe.method == "magnitude_blocks":
            return outlier_map(magnitude, OUTLIER_THRESHOLD, recipe.budget), recipe.high_weight_bits
        return uniform_map(columns, recipe.act_bits), recipe.weight_bits
