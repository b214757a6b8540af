"""`dual`: the recipe's exact transforms of a whole model, and the segments they make room for.

Order of the folds in a layer: norm gains, residual basis, key scaling, Hadamard and mean of the values, order of the
feed-forward. Everything but the Hadamard before down_proj and the one on q and k is folded into weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.plan import LayerPlan, LinearPlan, make_layout
from w4a4.export.transforms.ffn_order import channel_order, fold_channel_order
from w4a4.export.transforms.key_scaling import fold_key_scaling, key_scales
from w4a4.export.transforms.norm_gain import fold_final_norm, fold_norm_gains
from w4a4.export.transforms.residual_basis import residual_basis, rotate_layer, rotate_rows
from w4a4.export.transforms.value_hadamard import fold_value_hadamard, head_energy
from w4a4.export.transforms.value_mean import fold_value_mean
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.reference import block_hadamard

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
        extra: dict[str, Tensor] = {}

        def head_statistic(name: str) -> Tensor:
            return stats.head(index, name).to(device)

        key_mean = head_statistic("key_mean")
        if recipe.key_scaling:
            scales = key_scales(head_statistic("key_variance"), head_statistic("query_mean_square"), config.qk_norm)
            weights = fold_key_scaling(weights, scales)
            key_mean = key_mean / torch.cat([scales, scales], 1)
        value_mean = head_statistic("value_mean")
        head_weight = head_energy(
            stats.channel(index, "attn_out", "capped_energy").to(device),
            weights["self_attn.o_proj.weight"],
            config.head_dim,
        )
        if recipe.value_hadamard:
            weights = fold_value_hadamard(weights, config.head_dim)
            value_mean = block_hadamard(value_mean, config.head_dim & -config.head_dim)
        if recipe.kv_mean:
            extra["self_attn.k_mean"] = key_mean
            weights = fold_value_mean(weights, value_mean, config.num_heads)
        energy = stats.channel(index, "mlp_hidden", "capped_energy").to(device)
        order = channel_order(energy, weights["mlp.down_proj.weight"])
        weights = fold_channel_order(weights, order)
        return weights, extra, self._plan(head_weight)

    def _plan(self, head_weight: Tensor) -> LayerPlan:
        ranking = torch.argsort(head_weight, stable=True)
        lanes = torch.arange(self.config.head_dim, device=ranking.device)
        by_head = (ranking[:, None] * self.config.head_dim + lanes).flatten()
        return {
            name: LinearPlan(layout, by_head if name == "self_attn.o_proj" and len(layout.segments) > 1 else None)
            for name, layout in dual_layouts(self.config, self.recipe).items()
        }
