"""Take a static mean off the values, so that a 4-bit cache spends its range on what varies.

Attention weights add up to one, so the mean passes through attention unchanged and o_proj's bias can carry it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.export.transforms import LayerWeights


def fold_value_mean(layer: LayerWeights, mean: Tensor, num_heads: int) -> dict[str, Tensor]:
    """Subtract `mean` [num_kv_heads, head_dim] from the values; o_proj's bias gains W_o (mean of each q-head's group).

    Both biases exist afterwards, whether or not they did before.
    """
    folded = dict(layer)
    weight = layer["self_attn.o_proj.weight"]
    mean = mean.to(weight)
    per_query_head = mean.repeat_interleave(num_heads // mean.shape[0], 0).flatten()
    value_bias = layer.get("self_attn.v_proj.bias", torch.zeros_like(mean.flatten()))
    output_bias = layer.get("self_attn.o_proj.bias", torch.zeros_like(weight[:, 0]))
    folded["self_attn.v_proj.bias"] = value_bias - mean.flatten()
    folded["self_attn.o_proj.bias"] = output_bias + weight @ per_query_head
    return folded
