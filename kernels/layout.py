"""The static description of one quantised linear: its segments. Shared by the reference and every kernel.

A linear y = x Wᵀ + b, x [T, K], W [N, K], reads its input channels in *stored order* (after the transform and the
permutation). In that order channels form at most three runs of equal precision, always in the order [A4 | A8 | A16].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ActMode = Literal["map", "a8", "a16"]


@dataclass(frozen=True)
class Segment:
    """A run of input channels with one activation and one weight precision.

    `act_bits` 4 or 8: integer activations; 16: the activation is not quantised.
    `weight_bits` 4 or 8: integer weights with row scales; 16: outlier columns kept as bf16 (QUIK).
    """

    width: int
    act_bits: int
    weight_bits: int

    def __post_init__(self) -> None:
        allowed = {(4, 4), (8, 4), (8, 8), (16, 4), (16, 8), (16, 16)}
        if (self.act_bits, self.weight_bits) not in allowed or self.width <= 0:
            raise ValueError(
                f"no segment of width {self.width} with {self.act_bits}-bit activations and "
                f"{self.weight_bits}-bit weights; (activation, weight) bits must be one of {sorted(allowed)}"
            )


@dataclass(frozen=True)
class LinearLayout:
    """Segments of one linear in stored order, and how a 4-bit activation is clipped.

    `clip` is (c, beta) of s4 = min(c * absmax, beta * rms) / 7. `symmetric` is False for QUIK's asymmetric
    4-bit activations. `hadamard` is the block size of the online block-diagonal Hadamard applied to the input in
    stored order before it is quantised (1: none). `group_size` is the number of columns a weight scale covers in a
    (16, 4) segment; 0: the whole segment.
    """

    out_features: int
    segments: tuple[Segment, ...]
    clip: tuple[float, float] = (1.0, float("inf"))
    symmetric: bool = True
    hadamard: int = 1
    group_size: int = 0

    @property
    def in_features(self) -> int:
        return sum(segment.width for segment in self.segments)

    @property
    def num_scales(self) -> int:
        """Weight scales per row: one per integer-weight segment, or one per group."""
        if self.group_size:
            return self.in_features // self.group_size
        return sum(segment.weight_bits < 16 for segment in self.segments)

    def placed(self) -> Iterator[tuple[Segment, int, int]]:
        """Each segment, its first column, and which of `num_scales` is its weight scale (without groups)."""
        column = scale_index = 0
        for segment in self.segments:
            yield segment, column, scale_index
            column += segment.width
            scale_index += segment.weight_bits < 16

    def at(self, act: ActMode) -> LinearLayout:
        """The layout that runs when activations are forced to 8 (`a8`) or 16 (`a16`) bits; `map` changes nothing."""
        if act == "map":
            return self
        bits = {"a8": 8, "a16": 16}[act]
        segments = tuple(Segment(s.width, max(s.act_bits, bits), s.weight_bits) for s in self.segments)
        return LinearLayout(self.out_features, segments, self.clip, self.symmetric, self.hadamard, self.group_size)
