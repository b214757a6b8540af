"""Plans of the recipes that leave the weights as they are: `rtn`, `quik`, `fmpq`, `w4a16`, `w8a8`."""

from __future__ import annotations

from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF
from w4a4.calibrate.permutation import magnitude_permutation
from w4a4.calibrate.precision_map import outlier_column_map, outlier_map, shared_map, uniform_map, widest_share
from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.plan import LayerPlan, LinearPlan, make_layout
from w4a4.export.tensor_parallel import num_slices
from w4a4.kernels.layout import LinearLayout

OUTLIER_THRESHOLD = 2.0
"""FMPQ: a channel is an outlier if its absmax exceeds this many times the median channel's. COMET states the rule but
not the number; at 2 nearly every linear of a small model uses its whole budget of 8-bit blocks."""


def published_layout(
    name: str, shape: tuple[int, int], recipe: Recipe, magnitude: Tensor | None = None
) -> LinearLayout:
    """The segments of the linear `name` of `shape` (N, K).

    magnitude: calibrated absmax of its inputs [K]. None: as if it had outliers for all 8-bit blocks of the budget.
    """
    rows, columns = shape
    weight_bits = {4: recipe.weight_bits, 8: recipe.weight_bits, 16: recipe.weight_bits}
    if recipe.down_bits and name == "mlp.down_proj":
        precision = uniform_map(columns, recipe.down_bits)
        weight_bits[recipe.down_bits] = recipe.down_bits
    elif recipe.method == "outlier_columns":
        precision = outlier_column_map(columns, round(recipe.outlier_share * columns), recipe.act_bits)
        weight_bits[16] = 16
    elif recipe.method == "magnitude_blocks":
        weight_bits[8] = recipe.high_weight_bits
        if magnitude is None:
            precision = shared_map(columns, widest_share(columns, recipe.budget))
        else:
            precision = outlier_map(magnitude, OUTLIER_THRESHOLD, recipe.budget, num_slices(name, recipe))
    else:
        precision = uniform_map(columns, recipe.act_bits)
    return make_layout(rows, [(precision.width(bits), bits, weight_bits[bits]) for bits in (4, 8, 16)], recipe)


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
        for name, shape in self.config.linear_shapes().items():
            magnitude = self.stats.channel(index, INPUT_OF[name], "absmax")
            layout = published_layout(name, shape, self.recipe, magnitude)
            widths = [segment.width for segment in layout.segments]
            perm = None
            if len(widths) > 1:
                perm = magnitude_permutation(magnitude, widths, num_slices(name, self.recipe)).order.long()
            plan[name] = LinearPlan(layout, perm)
        return weights, {}, plan
