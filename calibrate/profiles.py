"""From calibration statistics to what the report draws: channel magnitudes before and after FMPQ's permutation.

The map shown is FMPQ's (COMET, section 3), whatever recipe is quantised later: it answers which layers have outliers
and how many blocks would hold them. A rotating recipe has no outliers left to show.
"""

from __future__ import annotations

import torch

from w4a4.calibrate.permutation import magnitude_permutation
from w4a4.calibrate.precision_map import outlier_map
from w4a4.calibrate.report import PointProfile
from w4a4.calibrate.statistics import POINTS, CalibrationStats


def magnitude_profiles(
    stats: CalibrationStats, num_layers: int, budget: float, threshold: float
) -> tuple[PointProfile, ...]:
    """One profile per layer and point.

    Args:
        budget: greatest share of a point's blocks that run at 8 bits.
        threshold: a channel is an outlier if its absmax exceeds this many times the median channel's.
    """
    profiles = []
    for layer in range(num_layers):
        for point in POINTS:
            magnitude = stats.channel(layer, point, "absmax")
            chosen = outlier_map(magnitude, threshold, budget)
            order = magnitude_permutation(magnitude, (magnitude.numel(),)).order
            bits = torch.tensor(chosen.bits, dtype=torch.int64)
            profiles.append(PointProfile(layer, point, magnitude, order, bits))
    return tuple(profiles)
