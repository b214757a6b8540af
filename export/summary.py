"""What a checkpoint costs, from its layouts: bits per weight and the share of multiply-adds at each precision.

Used by `w4a4 inspect`, the model card and every accuracy table. Only packed linears are counted: embeddings and lm_head
stay in 16 bit and are reported as bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from w4a4.export.checkpoint import PackedCheckpoint
from w4a4.export.packed_linear import SUFFIXES
from w4a4.kernels.layout import Segment


@dataclass(frozen=True)
class LinearSummary:
    """One packed linear. `stored_bytes` is everything under its name: codes, scales, order, map, bias."""

    name: str
    out_features: int
    in_features: int
    segments: tuple[Segment, ...]
    stored_bytes: int

    @property
    def num_weights(self) -> int:
        """Also the multiply-adds per token."""
        return self.out_features * self.in_features

    @property
    def weight_bits(self) -> float:
        """Mean bits per weight, codes alone."""
        return sum(s.width * s.weight_bits for s in self.segments) / self.in_features

    @property
    def act_bits(self) -> float:
        """Mean bits per input channel."""
        return sum(s.width * s.act_bits for s in self.segments) / self.in_features

    def mac_share(self, act_bits: int, weight_bits: int) -> float:
        """Share of its multiply-adds with exactly these activation and weight bits."""
        width = sum(s.width for s in self.segments if (s.act_bits, s.weight_bits) == (act_bits, weight_bits))
        return width / self.in_features


@dataclass(frozen=True)
class CheckpointSummary:
    """All packed linears of a checkpoint in order of use, and the bytes of what stays unquantised."""

    linears: tuple[LinearSummary, ...]
    unquantized_bytes: int
    kv_bits: int

    @property
    def num_weights(self) -> int:
        return sum(linear.num_weights for linear in self.linears)

    @property
    def packed_bytes(self) -> int:
        return sum(linear.stored_bytes for linear in self.linears)

    @property
    def weight_bits(self) -> float:
        """Mean bits per packed weight, codes alone."""
        return sum(linear.weight_bits * linear.num_weights for linear in self.linears) / self.num_weights

    @property
    def stored_bits(self) -> float:
        """Mean bits per packed weight with scales, order, map and bias."""
        return 8 * self.packed_bytes / self.num_weights

    @property
    def act_bits(self) -> float:
        """Mean activation bits, weighted by multiply-adds, with the precision map (`--act map`)."""
        return sum(linear.act_bits * linear.num_weights for linear in self.linears) / self.num_weights

    @property
    def mac_shares(self) -> dict[str, float]:
        """Share of the multiply-adds per "activation bits x weight bits", such as {"4x4": 0.9, "8x8": 0.1}."""
        pairs = sorted({(s.act_bits, s.weight_bits) for linear in self.linears for s in linear.segments})
        return {
            f"{act}x{weight}": sum(linear.mac_share(act, weight) * linear.num_weights for linear in self.linears)
            / self.num_weights
            for act, weight in pairs
        }

    @property
    def mac_share_4bit(self) -> float:
        """Share of the multiply-adds with 4-bit activations and 4-bit weights."""
        return self.mac_shares.get("4x4", 0.0)

    def to_json(self) -> dict[str, Any]:
        """Totals, and one row per linear, as JSON values."""
        return {
            "num_weights": self.num_weights,
            "weight_bits": self.weight_bits,
            "stored_bits": self.stored_bits,
            "act_bits": self.act_bits,
            "kv_bits": self.kv_bits,
            "mac_shares": self.mac_shares,
            "mac_share_4bit": self.mac_share_4bit,
            "packed_bytes": self.packed_bytes,
            "unquantized_bytes": self.unquantized_bytes,
            "linears": [
                asdict(linear) | {"weight_bits": linear.weight_bits, "act_bits": linear.act_bits}
                for linear in self.linears
            ],
        }


def summarize_checkpoint(checkpoint: PackedCheckpoint) -> CheckpointSummary:
    """Read layouts (not weights) of every packed linear. Raises CheckpointError."""
    linears = []
    for prefix in checkpoint.linear_names:
        layout = checkpoint.layout(prefix)
        names = [f"{prefix}.{suffix}" for suffix in SUFFIXES]
        stored = sum(checkpoint.entries[name].num_bytes for name in names if name in checkpoint.entries)
        linears.append(LinearSummary(prefix, layout.out_features, layout.in_features, layout.segments, stored))
    total = sum(entry.num_bytes for entry in checkpoint.entries.values())
    packed = sum(linear.stored_bytes for linear in linears)
    return CheckpointSummary(tuple(linears), total - packed, checkpoint.quantization["kv_cache"]["bits"])
