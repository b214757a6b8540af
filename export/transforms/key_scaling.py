"""Scale keys and queries against each other so that no RoPE pair of a key dominates its 4-bit range.

q·k does not change if a pair of key channels is divided by λ and the same pair of the query multiplied by it, and
since a rotation mixes only the two channels of a pair, a λ per pair commutes with RoPE (the pair-wise form of
SmoothAttention, QServe, Lin et al. 2024). In Hugging Face's layout pair i of a head is (i, i + head_dim / 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.configs.errors import UsageError
from w4a4.export.transforms import LayerWeights

_TINY = 1e-6


def key_scales(key_energy: Tensor, query_energy: Tensor, shared: bool = False) -> Tensor:
    """λ = sqrt(rms(k - mean k) / rms(q)) per kv-head and RoPE pair, float32 [num_kv_heads, head_dim / 2].

    Args:
        key_energy: E[(k - mean k)²] per channel after RoPE [num_kv_heads, head_dim].
        query_energy: E[q²] per channel [num_heads, head_dim].
        shared: one λ for all kv-heads (repeated in every row), for models whose q and k norms have one gain per
            channel of a head.

    λ is scaled to geometric mean 1 per head (a common factor changes nothing that is quantised) and dead pairs get 1.
    """
    num_kv_heads, head_dim = key_energy.shape
    query = query_energy.float().view(num_kv_heads, -1, head_dim).mean(1)
    key_pairs, query_pairs = _pair_energy(key_energy.float()), _pair_energy(query)
    if shared:
        key_pairs = key_pairs.mean(0, keepdim=True).expand_as(key_pairs)
        query_pairs = query_pairs.mean(0, keepdim=True).expand_as(query_pairs)
    alive = (key_pairs > _TINY * key_pairs.amax(1, keepdim=True)) & (
        query_pairs > _TINY * query_pairs.amax(1, keepdim=True)
    )
    logarithm = torch.where(alive, (key_pairs / query_pairs.clamp_min(1e-30)).clamp_min(1e-30).log() / 4, 0.0)
    count = alive.sum(1, keepdim=True).clamp_min(1)
    return torch.where(alive, logarithm - logarithm.sum(1, keepdim=True) / count, 0.0).exp()


def fold_key_scaling(layer: LayerWeights, scales: Tensor) -> dict[str, Tensor]:
    """Divide the keys by `scales` [num_kv_heads, head_dim / 2] and multiply the queries of each group by them.

    With q/k norms (Qwen3) the scales go into the norms' gains, which all heads share.

    Raises:
        UsageError: q/k norms, and scales that differ between kv-heads.
    """
    folded = dict(layer)
    per_channel = torch.cat([scales, scales], 1)  # [num_kv_heads, head_dim]
    if "self_attn.k_norm.weight" in layer:
        if not torch.equal(scales, scales[:1].expand_as(scales)):
            raise UsageError("q/k norms have one gain for all heads, so key scales must be shared between kv-heads")
        folded["self_attn.k_norm.weight"] = layer["self_attn.k_norm.weight"] / per_channel[0]
        folded["self_attn.q_norm.weight"] = layer["self_attn.q_norm.weight"] * per_channel[0]
        return folded
    num_heads = layer["self_attn.q_proj.weight"].shape[0] // per_channel.shape[1]
    key_factor = 1 / per_channel.flatten()
    query_factor = per_channel.repeat_interleave(num_heads // scales.shape[0], 0).flatten()
    for name, factor in (("k_proj", key_factor), ("q_proj", query_factor)):
        weight, bias = f"self_attn.{name}.weight", f"self_attn.{name}.bias"
        folded[weight] = layer[weight] * factor[:, None]
        if bias in layer:
            folded[bias] = layer[bias] * factor
    return folded


def _pair_energy(energy: Tensor) -> Tensor:
    half = energy.shape[1] // 2
    return energy[:, :half] + energy[:, half:]
