"""Scale input channels so that activations and weights share what is hard to round.

Dividing channel i of a linear's input by s_i and multiplying column i of its weight by it changes nothing, and where
the input is made by a norm gain, by v_proj or by up_proj, the division folds into that (SmoothQuant, Xiao et al. 2023).
With one step for all channels of a token and one for all columns of a row, the output error of rounding is
proportional to (Σ E[x_i²] / s_i²) (Σ s_i² ‖W_i‖²) for activations and weights alike; by Cauchy and Schwarz its least
value is (Σ rms(x_i) ‖W_i‖)², at s_i² = rms(x_i) / ‖W_i‖. A Hadamard that follows within blocks does not change that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from w4a4.export.transforms import LayerWeights

_TINY = 1e-6


def balance_scales(energy: Tensor, weight: Tensor) -> Tensor:
    """s = sqrt(rms(x) / ‖W_i‖), f32 [K], of geometric mean 1; channels that are dead on either side get 1.

    energy: E[x²] per input channel [K]. weight [N, K]; linears that read one input are stacked by rows.
    """
    energy, columns = energy.float(), weight.float().square().sum(0)
    alive = (energy > _TINY * energy.mean()) & (columns > _TINY * columns.mean())
    logarithm = torch.where(alive, (energy / columns).clamp_min(1e-30).log() / 4, 0.0)
    return torch.where(alive, logarithm - logarithm.sum() / alive.sum().clamp_min(1), 0.0).exp()


def grouped_scales(energy: Tensor, weight: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """`balance_scales` of o_proj's input for the channels of the kv-heads, f32 [num_kv_heads, head_dim].

    energy [num_heads * head_dim], weight [H, same]. q-heads of a group mix one kv-head's values, so they share scales.
    """
    energy = energy.float().view(num_kv_heads, -1, head_dim).sum(1).flatten()
    columns = weight.float().square().sum(0).view(num_kv_heads, -1, head_dim).sum(1).flatten()
    return balance_scales(energy, columns.sqrt()[None]).view(num_kv_heads, head_dim)


def fold_norm_balance(layer: LayerWeights, norm: str, readers: Sequence[str], scales: Tensor) -> dict[str, Tensor]:
    """Divide the gain of `norm` ("input_layernorm") by `scales` [H] and multiply its readers' columns by them."""
    folded = dict(layer)
    folded[f"{norm}.weight"] = layer[f"{norm}.weight"] / scales
    for reader in readers:
        folded[f"{reader}.weight"] = layer[f"{reader}.weight"] * scales
    return folded


def fold_value_balance(layer: LayerWeights, scales: Tensor) -> dict[str, Tensor]:
    """Divide the values by `scales` [num_kv_heads, head_dim] and multiply o_proj's columns of each group by them."""
    folded = dict(layer)
    weight = layer["self_attn.o_proj.weight"]
    group = weight.shape[1] // scales.numel()
    _divide_rows(folded, "self_attn.v_proj", scales.flatten())
    folded["self_attn.o_proj.weight"] = weight * scales.repeat_interleave(group, 0).flatten()
    return folded


def fold_inner_balance(layer: LayerWeights, scales: Tensor) -> dict[str, Tensor]:
    """Divide up_proj's outputs by `scales` [I] and multiply down_proj's columns by them; gate_proj stays."""
    folded = dict(layer)
    _divide_rows(folded, "mlp.up_proj", scales)
    folded["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"] * scales
    return folded


def _divide_rows(layer: dict[str, Tensor], name: str, scales: Tensor) -> None:
    layer[f"{name}.weight"] = layer[f"{name}.weight"] / scales[:, None]
    if f"{name}.bias" in layer:
        layer[f"{name}.bias"] = layer[f"{name}.bias"] / scales
