"""`dual`: the recipe's exact transforms of a whole model, and the segments they make room for.

Order of the folds in a layer: norm gains, residual basis, heads (`heads.py`), balance and order of the
feed-forward. Everything but the Hadamard before down_proj and the one on q and k is folded into weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.heads import prepare_heads
from w4a4.export.plan import LayerPlan, LinearPlan, make_layout
from w4a4.export.transforms.channel_balance import balance_scales, fold_inner_balance
from w4a4.export.transforms.ffn_order import channel_order, fold_channel_order
from w4a4.export.transforms.norm_gain import fold_final_norm, fold_norm_gains
from w4a4.export.transforms.residual_basis import residual_basis, rotate_layer, rotate_rows
from w4a4.kernels.layout import LinearLayout

BLOCK = 128


def high_width(width: int, share: float, multiple: int = BLOCK) -> int:
    """Channels of an input of `width` that get 8 bits: the multiple of `multiple` next below `share`, at least one.

    0 where no share is asked for or one multiple is all there is.
    """
    if share <= 0 or width <= multiple:
        return 0
    return max(multiple, int(share * width) // multiple * multiple)


def dual_layouts(config: ModelConfig, recipe: Recipe) -> dict[str, LinearLayout]:
    """The segments of a layer's linears by short name, alike in all layers before any promotion."""
    share = recipe.high_share
    high = dict.fromkeys(config.linear_shapes(), high_width(config.hidden_size, share))
    high["self_attn.o_proj"] = high_width(config.q_size, share, max(BLOCK // config.head_dim, 1) * config.head_dim)
    high["mlp.down_proj"] = high_width(config.intermediate_size, share)
    return {
        name: make_layout(
            rows,
            [(columns - high[name], 4, 4), (high[name], 8, recipe.high_weight_bits)],
            recipe,
            hadamard=recipe.down_hadamard if name == "mlp.down_proj" else 1,
        )
        for name, (rows, columns) in config.linear_shapes().items()
    }


class DualTransform:
    """The transforms of one model under one recipe. Holds the residual basis [H, H]; layers come and go."""

    def __init__(self, config: ModelConfig, recipe: Recipe, stats: CalibrationStats) -> None:
        self.config, self.recipe, self.stats = config, recipe, stats
        self.basis: Tensor | None = None
        if recipe.residual_basis:
            high = high_width(config.hidden_size, recipe.high_share)
            self.basis = residual_basis(stats.residual_covariance, high, recipe.seed)

    def embedding(self, table: Tensor) -> Tensor:
        """The embedding [V, H] in the residual basis."""
        return table if self.basis is None else rotate_rows(table, self.basis)

    def head(self, gain: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Final norm gain [H] and lm_head [V, H], the gain folded and the head in the basis."""
        gain, head = fold_final_norm(gain, head)
        return gain, head if self.basis is None else rotate_rows(head, self.basis)

    def layer(self, index: int, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], LayerPlan]:
        """Layer `index`: transformed weights by short name, further tensors (`self_attn.k_mean`), and the plan."""
        config, recipe, stats = self.config, self.recipe, self.stats
        device = weights["mlp.down_proj.weight"].device
        weights = fold_norm_gains(weights)
        if self.basis is not None:
            weights = rotate_layer(weights, self.basis.to(device))
        prepared = prepare_heads(config, recipe, stats, index, weights)
        weights = prepared.weights
        energy = stats.channel(index, "mlp_hidden", "capped_energy").to(device)
        if recipe.channel_balance:
            scales = balance_scales(energy, weights["mlp.down_proj.weight"])
            weights, energy = fold_inner_balance(weights, scales), energy / scales.square()
        order = channel_order(energy, weights["mlp.down_proj.weight"])
        weights = fold_channel_order(weights, order)
        return weights, prepared.extra, self._plan(prepared.head_energy)

    def _plan(self, head_energy: Tensor) -> LayerPlan:
        ranking = torch.argsort(head_energy, stable=True)
        lanes = torch.arange(self.config.head_dim, device=ranking.device)
        by_head = (ranking[:, None] * self.config.head_dim + lanes).flatten()
        return {
            name: LinearPlan(layout, by_head if name == "self_attn.o_proj" and len(layout.segments) > 1 else None)
            for name, layout in dual_layouts(self.config, self.recipe).items()
        }
