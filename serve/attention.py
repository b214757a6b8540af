"""What happens between the q|k|v product and the o_proj: norms, RoPE, the KV pages, attention. One class per device.

`begin` computes what all layers of a step share, `attend` runs one layer. The law of both is `kernels.kv4`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, kv_attention, kv_write, prepare_qk
from w4a4.kernels.reference import rms_norm
from w4a4.kernels.rope import rope_frequencies, rope_tables


@dataclass(frozen=True)
class HeadWeights:
    """What one layer's attention has of its own. Norm gains [D] of q and k, mean of rotated keys [Hkv, D]."""

    q_norm: Tensor | None
    k_norm: Tensor | None
    k_mean: Tensor | None
    window: int | None


class Attention(Protocol):
    """`path` says in words what runs."""

    @property
    def path(self) -> str: ...

    def begin(self, batch: KVBatch) -> Any:
        """Indices and rotary tables of a step, for every layer's `attend`."""
        ...

    def attend(self, qkv: Tensor, weights: HeadWeights, pages: Tensor, step: Any) -> Tensor:
        """Write K and V of qkv [T, (Hq + 2 Hkv) D] to the layer's pages, then attend: [T, Hq D]."""
        ...


@dataclass(frozen=True)
class _Step:
    """rows of the tables and slots: the new tokens of the step, T."""

    batch: KVBatch
    cos: Tensor  # f32 [T, D / 2]
    sin: Tensor
    slots: Tensor  # int64 [T]
    sink_slots: Tensor | None  # int64 [T]


class ReferenceAttention:
    """The law itself, in PyTorch on any device."""

    def __init__(self, config: ModelConfig, layout: KVPageLayout, use_hadamard: bool, device: torch.device) -> None:
        self.config, self.layout, self.use_hadamard = config, layout, use_hadamard
        frequencies, self.rope_factor = rope_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.frequencies = frequencies.to(device)
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]

    @property
    def path(self) -> str:
        return f"reference, KV {self.layout.bits} bit"

    def begin(self, batch: KVBatch) -> _Step:
        cos, sin = rope_tables(batch.positions, self.frequencies, self.rope_factor)
        return _Step(batch, cos, sin, batch.slots(self.layout), batch.sink_slots(self.layout))

    def attend(self, qkv: Tensor, weights: HeadWeights, pages: Tensor, step: _Step) -> Tensor:
        head_dim, eps = self.config.head_dim, self.config.rms_norm_eps
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, head_dim), self.head_counts, dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)
        q, k = prepare_qk(q, k, step.cos, step.sin, weights.k_mean, self.use_hadamard)
        kv_write(k, v, pages, step.slots, self.layout, step.sink_slots)
        attended = kv_attention(q, pages, step.batch, self.layout, head_dim**-0.5, weights.window)
        return attended.flatten(1)
