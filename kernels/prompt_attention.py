"""Causal attention of prompts over contiguous keys and values, through PyTorch's SDPA.

FlashAttention takes any shape at once. cuDNN is 1.7 to 1.8 times as fast on large whole prompts (H200, heads of 128),
but takes the host 0.1 ms a call and some 60 ms for a plan of every new shape and thread. So whole prompts are rounded
up to few lengths, where the mask hides what is added, and cuDNN gets a shape once FlashAttention has computed so much
of it that a plan is likely to pay: traffic that recurs has it after a few steps, a prompt that comes once never waits.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

MIN_OPERATIONS = 3e10
"""Of one attention: with fewer, FlashAttention is done before the host has called cuDNN."""
PLAN_OPERATIONS = 5e12
"""Multiplications and additions of one shape after which it gets a plan: some 20 ms of FlashAttention, of which cuDNN
would have saved 9."""
_NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PLANS = [SDPBackend.CUDNN_ATTENTION, *_NO_PLANS]


class _Seen(threading.local):
    """Operations so far, by shape; by thread, as PyTorch keeps cuDNN's plans."""

    def __init__(self) -> None:
        self.operations: dict[tuple[int, ...], float] = {}


_seen = _Seen()


def rounded_length(tokens: int) -> int:
    """The length as which a whole prompt is planned: a multiple of a sixteenth of the next power of two."""
    step = max(64, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def is_planned(sequences: int, heads: int, tokens: int, dim: int) -> bool:
    """Count one attention of whole prompts of a `rounded_length`; whether this shape is cuDNN's by now."""
    operations = 2.0 * sequences * heads * dim * tokens**2
    if operations < MIN_OPERATIONS or dim > 128:
        return False
    shape = (sequences, heads, tokens, dim)
    total = _seen.operations.get(shape, 0.0) + operations
    _seen.operations[shape] = total
    return total > PLAN_OPERATIONS


def attend_planned(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Whole prompts q [B, T, Hq, D] over keys and values [B, Hkv, n, D], n = `rounded_length`(T): [B, T, Hq, D].

    Keys and values past T must be finite; nobody sees them.
    """
    tokens, length = q.shape[1], keys.shape[2]
    q = pad(q, (0, 0, 0, 0, 0, length - tokens)) if length > tokens else q
    with sdpa_kernel(_PLANS, set_priority=True):
        out = scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2)[:, :tokens]


def attend_causally(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """SDPA of the last T positions, q [B, T, Hq, D], over keys and values [B, Hkv, n, D]: [B, T, Hq, D]."""
    tokens, length = q.shape[1], keys.shape[2]
    mask: Tensor | None = None
    if window is not None and window < length:
        positions = torch.arange(length, device=q.device)
        distance = positions[length - tokens :, None] - positions
        mask = (distance >= 0) & (distance < window)
    elif tokens != length:
        mask = causal_lower_right(tokens, length)
    is_flash = not isinstance(mask, Tensor) or isinstance(mask, CausalBias)
    with sdpa_kernel(_NO_PLANS) if is_flash else nullcontext():
        out = scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2)
