"""`fmpq-int8`: FMPQ's permutation by magnitude and 8-bit blocks, on balanced channels, int8 weights in those blocks.

Nothing rotates the residual stream: a stage's channels are scaled against its weights by exact folds, sorted by
magnitude, and every stage gets as many 8-bit blocks as the model's budget is best spent on (`promotion.block_widths`).
Values are rotated inside a head, and down_proj's input inside a block, after the sort, so blocks keep their channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF
from w4a4.calibrate.permutation import magnitude_permutation
from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.heads import prepare_heads
from w4a4.export.plan import LayerPlan, LinearPlan, make_layout
from w4a4.export.transforms import ATTENTION_READERS, FFN_READERS
from w4a4.export.transforms.channel_balance import balance_scales, fold_inner_balance, fold_norm_balance
from w4a4.kernels.layout import LinearLayout


def balanced_layouts(config: ModelConfig, recipe: Recipe) -> dict[str, LinearLayout]:
    """A layer's linears by short name before the budget is spent: every channel at 4 bits."""
    return {
        name: make_layout(
            rows, [(columns, 4, 4)], recipe, hadamard=recipe.down_hadamard if name == "mlp.down_proj" else 1
        )
        for name, (rows, columns) in config.linear_shapes().items()
    }


class BalancedBlocks:
    """The transforms of one model under the recipe, and the order of its channels. Layers come and go."""

    def __init__(self, config: ModelConfig, recipe: Recipe, stats: CalibrationStats) -> None:
        self.config, self.recipe, self.stats = config, recipe, stats

    def embedding(self, table: Tensor) -> Tensor:
        return table

    def head(self, gain: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return gain, head

    def layer(self, index: int, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], LayerPlan]:
        """Layer `index`: balanced weights by short name, further tensors (`self_attn.k_mean`), and the plan.

        Channels are in ascending order of magnitude, rms of the calibration tokens with massive ones capped, after
        the balance; the strongest stand last, where 8-bit blocks go.
        """
        device = weights["mlp.down_proj.weight"].device

        def energy_of(point: str) -> Tensor:
            return self.stats.channel(index, point, "capped_energy").to(device)

        energy = {point: energy_of(point) for point in ("attn_in", "mlp_in", "attn_out", "mlp_hidden")}
        if self.recipe.channel_balance:
            for point, norm, readers in (
                ("attn_in", "input_layernorm", ATTENTION_READERS),
                ("mlp_in", "post_attention_layernorm", FFN_READERS),
            ):
                scales = balance_scales(energy[point], torch.cat([weights[f"{name}.weight"] for name in readers]))
                weights = fold_norm_balance(weights, norm, readers, scales)
                energy[point] = energy[point] / scales.square()
            scales = balance_scales(energy["mlp_hidden"], weights["mlp.down_proj.weight"])
            weights = fold_inner_balance(weights, scales)
            energy["mlp_hidden"] = energy["mlp_hidden"] / scales.square()
        heads = prepare_heads(self.config, self.recipe, self.stats, index, weights)
        energy["attn_out"] = energy["attn_out"] / heads.output_scales.square()
        if self.recipe.value_hadamard:  # spreads each head's energy over its channels
            size = self.config.head_dim
            energy["attn_out"] = energy["attn_out"].view(-1, size).mean(1).repeat_interleave(size)
        plan: dict[str, LinearPlan] = {}
        for name, layout in balanced_layouts(self.config, self.recipe).items():
            magnitude = energy[INPUT_OF[name]].sqrt()
            plan[name] = LinearPlan(layout, magnitude_permutation(magnitude, [len(magnitude)]).order.long().to(device))
        return heads.weights, heads.extra, plan
