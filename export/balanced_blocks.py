"""`dual` and `fmpq-int8`: channels balanced against their weights, and blocks of 8 bits where the model needs them.

`dual` first turns the residual stream into its principal axes, which `fmpq-int8` leaves as they are. Then both scale
the input channels of every stage against its weights by exact folds, order them by what they contribute to the output
and give every stage as many 8-bit blocks, of the strongest channels, as the model's budget is best spent on
(`promotion.block_widths`). Everything but the Hadamard before down_proj and the one on q and k is folded into weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.heads import prepare_heads
from w4a4.export.plan import LayerPlan, LinearPlan, make_layout
from w4a4.export.transforms import ATTENTION_READERS, FFN_READERS
from w4a4.export.transforms.channel_balance import balance_scales, fold_inner_balance, fold_norm_balance
from w4a4.export.transforms.ffn_order import channel_order, fold_channel_order
from w4a4.export.transforms.norm_gain import fold_final_norm, fold_norm_gains
from w4a4.export.transforms.residual_basis import residual_basis, rotate_layer, rotate_rows
from w4a4.kernels.layout import LinearLayout

NORMS = (
    ("attn_in", "input_layernorm", ATTENTION_READERS),
    ("mlp_in", "post_attention_layernorm", FFN_READERS),
)


def balanced_layouts(config: ModelConfig, recipe: Recipe) -> dict[str, LinearLayout]:
    """A layer's linears by short name before the budget is spent: every channel at 4 bits."""
    return {
        name: make_layout(
            rows, [(columns, 4, 4)], recipe, hadamard=recipe.down_hadamard if name == "mlp.down_proj" else 1
        )
        for name, (rows, columns) in config.linear_shapes().items()
    }


class BalancedBlocks:
    """The transforms of one model under a recipe. Holds the residual basis [H, H] if any; layers come and go."""

    def __init__(self, config: ModelConfig, recipe: Recipe, stats: CalibrationStats) -> None:
        self.config, self.recipe, self.stats = config, recipe, stats
        self.basis: Tensor | None = None
        if recipe.residual_basis:
            self.basis = residual_basis(stats.residual_covariance, recipe.seed)
            self.axis_energy = ((stats.residual_covariance @ self.basis) * self.basis).sum(0)

    def embedding(self, table: Tensor) -> Tensor:
        """The embedding [V, H] in the residual basis."""
        return table if self.basis is None else rotate_rows(table, self.basis)

    def head(self, gain: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Final norm gain [H] and lm_head [V, H]; with a residual basis the gain folded and the head in it."""
        if self.basis is None:
            return gain, head
        gain, head = fold_final_norm(gain, head)
        return gain, rotate_rows(head, self.basis)

    def layer(self, index: int, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], LayerPlan]:
        """Layer `index`: transformed weights by short name, further tensors (`self_attn.k_mean`), and the plan.

        The plan has the channels in ascending order of what they contribute to the output; the strongest stand last,
        where 8-bit blocks go. Axes of the residual basis ascend as they are, for all layers alike.
        """
        device = weights["mlp.down_proj.weight"].device
        if self.basis is not None:
            weights = rotate_layer(fold_norm_gains(weights), self.basis.to(device))
        perms: dict[str, Tensor] = {}
        for point, norm, readers in NORMS:
            energy = self._norm_energy(index, point).to(device)
            stacked = torch.cat([weights[f"{name}.weight"] for name in readers])
            if self.basis is None:
                perms |= dict.fromkeys(readers, channel_order(energy, stacked))
            if self.recipe.channel_balance:
                weights = fold_norm_balance(weights, norm, readers, balance_scales(energy, stacked))
        energy = self.stats.channel(index, "mlp_hidden", "capped_energy").to(device)
        order = channel_order(energy, weights["mlp.down_proj.weight"])
        if self.recipe.channel_balance:
            weights = fold_inner_balance(weights, balance_scales(energy, weights["mlp.down_proj.weight"]))
        weights = fold_channel_order(weights, order)
        heads = prepare_heads(self.config, self.recipe, self.stats, index, weights)
        perms["self_attn.o_proj"] = torch.argsort(heads.contribution, stable=True)
        layouts = balanced_layouts(self.config, self.recipe)
        return heads.weights, heads.extra, {n: LinearPlan(layout, perms.get(n)) for n, layout in layouts.items()}

    def _norm_energy(self, index: int, point: str) -> Tensor:
        """E[x²] [H] of a norm's output: in the residual basis, where it has no gain, the mean over all norms.

        That of the one norm would gain a hundredth of the error, for a covariance per norm.
        """
        return self.stats.channel(index, point, "capped_energy") if self.basis is None else self.axis_energy
