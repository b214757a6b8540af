"""The order in which a linear stores its input channels, so that channels of one precision are adjacent.

COMET's FMPQ (section 3): sort channels by calibrated magnitude, so that outliers fill as few blocks as possible. The
sort stays inside each of `tp_max` equal slices of the input, so that tensor parallelism can cut the stored order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.configs.errors import CheckpointError, UsageError


@dataclass(frozen=True, eq=False)
class ChannelPermutation:
    """Stored channel j reads input channel order[j]; `order` is int32 [K].

    widths: of the segments in stored order, adding up to K. With tp_max > 1 every segment is cut into tp_max equal
    parts and part r of each reads only channels of the r-th slice of the input: rank r takes part r of every segment.

    Raises:
        CheckpointError: `order` repeats or misses a channel, or mixes slices.
    """

    order: Tensor
    widths: tuple[int, ...]
    tp_max: int = 1

    def __post_init__(self) -> None:
        channels = self.order.shape[0]
        if self.order.ndim != 1 or sum(self.widths) != channels:
            raise CheckpointError(f"permutation of shape {tuple(self.order.shape)}, expected [{sum(self.widths)}]")
        if not torch.equal(self.order.sort().values.long(), torch.arange(channels)):
            raise CheckpointError(f"permutation of {channels} channels repeats or misses some")
        _check_slices(self.widths, self.tp_max)
        slice_of = self.order.long() // max(1, channels // self.tp_max)
        if not torch.equal(slice_of, _slice_of_stored(self.widths, self.tp_max)):
            raise CheckpointError(f"permutation of {channels} channels is not block-diagonal over {self.tp_max} slices")

    def slice(self, rank: int) -> Tensor:
        """int64 [K / tp_max]: the channels of rank `rank` in stored order, counted within its slice of the input."""
        width = self.order.shape[0] // self.tp_max
        mine = _slice_of_stored(self.widths, self.tp_max) == rank
        return self.order.long()[mine] - rank * width


def magnitude_permutation(magnitude: Tensor, widths: Sequence[int], tp_max: int = 1) -> ChannelPermutation:
    """Channels by ascending `magnitude` [K], the largest in the last segment; equal magnitudes keep their order.

    Args:
        widths: of the segments in stored order, adding up to K, each a multiple of tp_max.

    Raises:
        UsageError: widths that do not add up to K or cannot be cut into tp_max parts.
    """
    channels = magnitude.shape[0]
    if sum(widths) != channels:
        raise UsageError(f"segments of widths {list(widths)} do not add up to {channels} channels")
    _check_slices(widths, tp_max)
    starts = torch.arange(tp_max)[:, None] * (channels // tp_max)
    ranked = torch.argsort(magnitude.float().cpu().view(tp_max, -1), dim=1, stable=True) + starts
    parts = torch.split(ranked, [width // tp_max for width in widths], dim=1)
    order = torch.cat([part.flatten() for part in parts])
    return ChannelPermutation(order.to(torch.int32), tuple(widths), tp_max)


def _check_slices(widths: Sequence[int], tp_max: int) -> None:
    if tp_max < 1 or any(width % tp_max for width in widths):
        raise UsageError(
            f"segments of widths {list(widths)} cannot be cut into {tp_max} equal slices",
            "lower tp_max or choose other shares of 8-bit channels",
        )


def _slice_of_stored(widths: Sequence[int], tp_max: int) -> Tensor:
    parts = [torch.arange(tp_max).repeat_interleave(width // tp_max) for width in widths]
    return torch.cat(parts)
