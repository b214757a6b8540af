"""Rotary position embedding: frequencies for every scaling rule that supported models use, and its application.

Half-split convention of Hugging Face checkpoints: channel i rotates with channel i + head_dim / 2 (Su et al. 2021).
The order of float operations is transformers', so that the frequencies are the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[Tensor, float]:
    """Inverse frequencies f32 [head_dim / 2] (radians per position) and the factor on cos and sin.

    `dynamic` equals the default up to `max_positions`, which is as far as a model is run here.
    `llama3` and `yarn` (Peng et al. 2023) follow the parameters of config.json.

    Raises:
        ValueError: an unknown scaling rule.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = theta**exponent
    frequencies = 1.0 / periods
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "dynamic"):
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(periods, head_dim, theta, scaling, max_positions)
    raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(ROPE_TYPES)}")


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns: Tensor = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(
    periods: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or max_positions

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if scale and scale_all:  # DeepSeek's pair of factors; one alone means nothing
            attention = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
        else:
            attention = _yarn_scale(factor, 1.0)
    keep = 1 - ramp
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep, float(attention)


def _yarn_scale(factor: float, slope: float) -> float:
    return 0.1 * slope * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin f32 [T, head_dim / 2] for integer positions [T]."""
    angles = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., T, heads, head_dim] by cos, sin [T, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2).to(x), sin.unsqueeze(-2).to(x)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
