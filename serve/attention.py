"""What happens between the q|k|v product and o_proj: norms, RoPE, the KV pages, attention.

`begin` computes what all layers of a step share, `attend` runs one layer. The law, and the choice of kernels, is
`kernels.kv4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, kv_attention, kv_rope_write
from w4a4.kernels.rope import rope_frequencies, rope_tables
from w4a4.serve.step_batches import DecodeBatch


@dataclass(frozen=True)
class HeadWeights:
    """What one layer's attention has of its own.

    norms: gains [D] of the RMSNorm on each head of q and of k, or None; k_mean: [Hkv, D] of rotated keys, or None.
    """

    norms: tuple[Tensor, Tensor] | None
    k_mean: Tensor | None
    window: int | None


@dataclass(frozen=True)
class AttentionStep:
    """What all layers of a step of T new tokens share."""

    batch: KVBatch
    cos: Tensor  # f32 [T, D / 2]
    sin: Tensor
    slots: Tensor  # int64 [T]
    sink_slots: Tensor | None  # int64 [T]


class PagedAttention:
    """Attention of one model over pages of one layout, on one device."""

    def __init__(self, config: ModelConfig, layout: KVPageLayout, use_hadamard: bool, device: torch.device) -> None:
        self.config, self.layout, self.use_hadamard = config, layout, use_hadamard
        frequencies, self.rope_factor = rope_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.frequencies = frequencies.to(device)
        self.tables: tuple[Tensor, Tensor] | None = None
        if device.type == "cuda":  # two look-ups in a step instead of six launches
            positions = torch.arange(config.max_position_embeddings, device=device)
            self.tables = rope_tables(positions, self.frequencies, self.rope_factor)

    @property
    def path(self) -> str:
        """What runs, in words."""
        where = "sm_90" if self.frequencies.device.type == "cuda" else "reference-cpu"
        return f"{where}, KV {self.layout.bits} bit"

    def begin(self, batch: KVBatch) -> AttentionStep:
        """Rotary tables and slots of a step."""
        if self.tables is None:
            cos, sin = rope_tables(batch.positions, self.frequencies, self.rope_factor)
        elif isinstance(batch, DecodeBatch):
            return self._begin_decode(batch, self.tables)
        else:
            positions = batch.positions.clamp(min=0)  # empty slots have none
            cos, sin = self.tables[0][positions], self.tables[1][positions]
        return AttentionStep(batch, cos, sin, batch.slots(self.layout), batch.sink_slots(self.layout))

    def _begin_decode(self, batch: DecodeBatch, tables: tuple[Tensor, Tensor]) -> AttentionStep:
        from w4a4.kernels.decode_indices import decode_indices

        indices = decode_indices(batch.context_lengths, batch.block_tables, batch.sink_pages, tables, self.layout)
        batch.planned(("tile_ends", None), lambda: indices.tile_ends)
        return AttentionStep(batch, indices.cos, indices.sin, indices.slots, indices.sink_slots)

    def attend(self, qkv: Tensor, weights: HeadWeights, pages: Tensor, step: AttentionStep) -> Tensor:
        """Write K and V of qkv [T, (Hq + 2 Hkv) D] to the layer's pages, then attend: [T, Hq D]."""
        head_dim = self.config.head_dim
        q = kv_rope_write(
            qkv.view(qkv.shape[0], -1, head_dim), step.cos, step.sin, pages, step.slots, self.layout, step.sink_slots,
            weights.k_mean, self.use_hadamard, weights.norms, self.config.rms_norm_eps,
        )  # fmt: skip
        return kv_attention(q, pages, step.batch, self.layout, head_dim**-0.5, weights.window).flatten(1)
