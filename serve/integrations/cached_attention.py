"""Attention over keys and values as a 4-bit (or 16-bit) cache would give them back, for caches that keep plain floats.

The cache of another runtime stores rotated keys and values in its own dtype; what KV4 makes of a token depends on that
token alone, so rounding them where they are read gives the numbers of `kernels.kv4` without its pages. Not its memory:
a float cache is eight times as large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.kernels.kv4 import QUERY_TILE
from w4a4.kernels.reference import block_hadamard, quantize_kv


@dataclass(frozen=True)
class CacheRules:
    """What a checkpoint asks of its cache. bits: 4 or 16; num_sinks: first positions kept in 16 bits beside 4."""

    bits: int
    use_qk_hadamard: bool
    num_sinks: int


def attend_cached(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, is_sink: Tensor, scale: float, rules: CacheRules
) -> Tensor:
    """Attention of rotated heads, computed in float64 as `kernels.kv4.kv_attention` does and rounded once.

    Args:
        query: [B, Hq, T, D]. key: [B, Hkv, n, D], its mean taken off. value: [B, Hkv, n, D].
        visible: bool [B or 1, 1, T, n]: which keys a query sees. A query that sees none gets 0.
        is_sink: bool [B or 1, n]: keys and values that are kept in 16 bits.
        scale: factor of q·k before softmax.
    Returns: [B, T, Hq, D] in query's dtype.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    q, k = query.float(), key.float()
    if rules.use_qk_hadamard:
        q, k = block_hadamard(q, head_dim), block_hadamard(k, head_dim)
    keys, values = (_cached(x, is_sink[:, None, :, None], rules).unsqueeze(2) for x in (k, value.float()))
    grouped = (q.double() * scale).view(batch, num_kv_heads, -1, num_tokens, head_dim)
    outputs = []
    for start in range(0, num_tokens, QUERY_TILE):
        stop = start + QUERY_TILE
        hidden = ~visible[:, :, None, start:stop]
        scores = (grouped[:, :, :, start:stop] @ keys.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        probabilities = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
        outputs.append(probabilities @ values)
    output = torch.cat(outputs, 3).view(batch, num_heads, num_tokens, head_dim)
    return output.transpose(1, 2).to(query.dtype)


def _cached(x: Tensor, is_sink: Tensor, rules: CacheRules) -> Tensor:
    """x float32 [B, H, n, D] as the cache gives it back, float64."""
    if rules.bits == 16:
        return x.bfloat16().double()
    codes, scale, zero = quantize_kv(x)
    rounded = codes.double() * scale.double().unsqueeze(-1) + zero.double().unsqueeze(-1)
    return torch.where(is_sink, x.bfloat16().double(), rounded) if rules.num_sinks else rounded
