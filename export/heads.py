"""Keys, values and o_proj of a layer, prepared for a 4-bit cache and 4-bit channels by exact folds.

In order: balance of q and k per RoPE pair, balance of the values' channels, Hadamard of the values, means. Which of
them run is the recipe's choice; none touches the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe
from w4a4.export.transforms.channel_balance import fold_value_balance, grouped_scales
from w4a4.export.transforms.key_scaling import fold_key_scaling, key_scales
from w4a4.export.transforms.value_hadamard import fold_value_hadamard
from w4a4.export.transforms.value_mean import fold_value_mean
from w4a4.kernels.reference import block_hadamard


@dataclass(frozen=True)
class PreparedHeads:
    """weights: the layer's, by short name. extra: further tensors to store (`self_attn.k_mean`)."""

    weights: dict[str, Tensor]
    extra: dict[str, Tensor]
    contribution: Tensor  # [num_heads * head_dim]: of o_proj's inputs to its output; alike in a head that is rotated


def prepare_heads(
    config: ModelConfig, recipe: Recipe, stats: CalibrationStats, index: int, weights: dict[str, Tensor]
) -> PreparedHeads:
    """The weights of layer `index` with its heads prepared as `recipe` says."""
    device = weights["self_attn.o_proj.weight"].device

    def head_statistic(name: str) -> Tensor:
        return stats.head(index, name).to(device)

    extra: dict[str, Tensor] = {}
    if recipe.key_scaling:
        scales = key_scales(head_statistic("key_variance"), head_statistic("query_mean_square"), config.qk_norm)
        weights = fold_key_scaling(weights, scales)
    if recipe.kv_mean:
        key_mean = head_statistic("key_mean")
        extra["self_attn.k_mean"] = key_mean / torch.cat([scales, scales], 1) if recipe.key_scaling else key_mean
    energy = stats.channel(index, "attn_out", "capped_energy").to(device)
    output_weight = weights["self_attn.o_proj.weight"]
    contribution = energy * output_weight.square().sum(0)
    value_scales = torch.ones(config.num_kv_heads, config.head_dim, device=device)
    if recipe.channel_balance:
        value_scales = grouped_scales(energy, output_weight, config.num_kv_heads, config.head_dim)
        weights = fold_value_balance(weights, value_scales)
    if recipe.value_hadamard:
        weights = fold_value_hadamard(weights, config.head_dim)
        contribution = contribution.view(-1, config.head_dim).mean(1).repeat_interleave(config.head_dim)
    if recipe.kv_mean:
        value_mean = head_statistic("value_mean") / value_scales
        if recipe.value_hadamard:
            value_mean = block_hadamard(value_mean, config.head_dim & -config.head_dim)
        weights = fold_value_mean(weights, value_mean, config.num_heads)
    return PreparedHeads(weights, extra, contribution)
