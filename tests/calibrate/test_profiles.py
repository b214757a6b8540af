from __future__ import annotations

import torch

from w4a4.calibrate.profiles import magnitude_profiles
from w4a4.calibrate.statistics import POINTS, CalibrationRun, CalibrationStats

RUN = CalibrationRun("tiny", None, "text", 1, 8, 0, "0" * 64)


def test_outlier_channels_end_in_the_8_bit_blocks_of_their_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        for point in POINTS:
            magnitude = 1 + torch.rand(512, generator=generator)
            if layer == 1 and point == "mlp_in":
                magnitude[[3, 400]] = 100.0
            tensors[f"layers.{layer}.{point}.absmax"] = magnitude
    stats = CalibrationStats(RUN, torch.zeros(1, 8, dtype=torch.int32), tensors)
    profiles = magnitude_profiles(stats, 2, budget=0.25, threshold=2.0)
    assert [(profile.layer, profile.point) for profile in profiles] == [
        (layer, point) for layer in (0, 1) for point in POINTS
    ]
    for profile in profiles:
        is_special = profile.layer == 1 and profile.point == "mlp_in"
        assert profile.bits.tolist() == ([4, 4, 4, 8] if is_special else [4, 4, 4, 4])
        after = profile.after
        assert (after[:-1] <= after[1:]).all()
        assert sorted(after) == sorted(profile.before)
        if is_special:
            assert profile.permutation is not None
            assert set(profile.permutation[-2:].tolist()) == {3, 400}
