"""Which blocks of a linear's input channels run at 4, 8 or 16 bits, and how a model spends its budget of 8-bit MACs.

Pure rules on calibrated magnitudes. FMPQ (COMET, section 3): blocks that hold outlier channels get 8 bits. QUIK
(section 3): a fixed number of columns with the largest magnitude stays in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from w4a4.configs.errors import CheckpointError, UnsupportedError, UsageError

BLOCK_SIZE = 128
_MIN_BLOCK_SIZE = 8  # eight int4 codes fill one packed word


def block_size_of(channels: int) -> int:
    """The largest power of two up to 128 that divides `channels`: 128, or 64 for 576.

    Raises:
        UnsupportedError: below 8.
    """
    size = math.gcd(channels, BLOCK_SIZE)
    if size < _MIN_BLOCK_SIZE:
        raise UnsupportedError(f"a linear with {channels} inputs: the width must be a multiple of {_MIN_BLOCK_SIZE}")
    return size


@dataclass(frozen=True)
class PrecisionMap:
    """Activation bits of every block in stored order: 4, then 8, then 16.

    Raises:
        CheckpointError: a value that is not 4, 8 or 16, or blocks out of order.
    """

    block_size: int
    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = sorted(set(self.bits) - {4, 8, 16})
        if wrong:
            raise CheckpointError(f"precision map holds {wrong}, allowed are 4, 8 and 16")
        if list(self.bits) != sorted(self.bits):
            raise CheckpointError(f"precision map {self.bits} must ascend: blocks of equal precision are adjacent")

    def width(self, bits: int) -> int:
        """Channels that run at `bits`."""
        return self.block_size * self.bits.count(bits)


def uniform_map(channels: int, bits: int) -> PrecisionMap:
    """Every block at `bits`."""
    size = block_size_of(channels)
    return PrecisionMap(size, (bits,) * (channels // size))


def shared_map(channels: int, wide_channels: int, wide_bits: int = 8, narrow_bits: int = 4) -> PrecisionMap:
    """The last `wide_channels` at `wide_bits`, rounded down to whole blocks, the rest at `narrow_bits`."""
    size = block_size_of(channels)
    wide = wide_channels // size
    if not 0 <= wide <= channels // size:
        raise UsageError(f"{wide_channels} of {channels} channels cannot run at {wide_bits} bits")
    return PrecisionMap(size, (narrow_bits,) * (channels // size - wide) + (wide_bits,) * wide)


def outlier_channels(magnitude: Tensor, threshold: float) -> Tensor:
    """bool [K]: channels whose calibrated `magnitude` [K] exceeds `threshold` times the median channel's."""
    magnitude = magnitude.float()
    return magnitude > threshold * magnitude.median()


def outlier_map(magnitude: Tensor, threshold: float, budget: float, tp_max: int = 1) -> PrecisionMap:
    """FMPQ: as many 8-bit blocks as the outlier channels fill after a sort by magnitude, within a budget.

    Args:
        magnitude: calibrated absmax per channel [K], in any order.
        threshold: times the median from which a channel is an outlier.
        budget: greatest share of the blocks that may run at 8 bits; a linear with outliers gets at least one block if
            the budget is above zero.
        tp_max: outliers fill the same number of blocks in every one of so many slices of the input.
    """
    channels = magnitude.shape[0]
    size = block_size_of(channels)
    outliers = outlier_channels(magnitude.cpu(), threshold).view(tp_max, -1).sum(1)
    needed = math.ceil(int(outliers.max()) / (size / tp_max)) * size
    return shared_map(channels, min(needed, widest_share(channels, budget)))


def widest_share(channels: int, budget: float) -> int:
    """Channels that may run at 8 bits: whole blocks within a `budget` in [0, 1], at least one if it is above zero."""
    size = block_size_of(channels)
    return max(1, int(budget * (channels // size))) * size if budget > 0 else 0


def outlier_column_map(channels: int, outliers: int, base_bits: int = 4) -> PrecisionMap:
    """QUIK: about `outliers` columns in 16 bits, at least one block if any, the rest at `base_bits`."""
    size = block_size_of(channels)
    blocks = 0 if outliers <= 0 else max(1, round(outliers / size))
    return shared_map(channels, min(blocks, channels // size) * size, wide_bits=16, narrow_bits=base_bits)


def spend(errors: Sequence[Sequence[float]], costs: Sequence[int], budget: int) -> list[int]:
    """How many 8-bit blocks each stage gets: one at a time, to the stage whose error falls most per MAC.

    Args:
        errors: per stage, its error with 0, 1, 2, ... blocks at 8 bits.
        costs: per stage, the MACs of one block.
        budget: greatest sum of costs.

    Greedy; a step is as many blocks as lower the error most per MAC (more than one where the first alone gains
    little); a stage whose next step no longer fits or gains nothing is left. Ties go to the first.
    """
    blocks, left = [0] * len(errors), budget
    while True:
        steps = [
            ((known[now] - known[then]) / ((then - now) * cost), -stage, then)
            for stage, (known, now, cost) in enumerate(zip(errors, blocks, costs, strict=True))
            for then in range(now + 1, len(known))
            if (then - now) * cost <= left and known[then] < known[now]
        ]
        if not steps:
            return blocks
        _, stage, then = max(steps)
        left -= (then - blocks[-stage]) * costs[-stage]
        blocks[-stage] = then
