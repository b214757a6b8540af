"""`kernels.layout`: which segments exist, what they add up to, and what forced activations change."""

from __future__ import annotations

import pytest

from w4a4.kernels.layout import LinearLayout, Segment


@pytest.mark.parametrize("bits", [(4, 8), (4, 16), (8, 16), (2, 4), (16, 2)])
def test_combinations_without_a_meaning_are_refused(bits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{bits[0]}-bit activations and {bits[1]}-bit weights"):
        Segment(128, *bits)


@pytest.mark.parametrize("width", [0, -64])
def test_a_segment_has_channels(width: int) -> None:
    with pytest.raises(ValueError, match=f"width {width}"):
        Segment(width, 4, 4)


def test_scales_count_integer_segments_only() -> None:
    layout = LinearLayout(64, (Segment(256, 4, 4), Segment(128, 8, 8), Segment(64, 16, 16)))
    assert layout.in_features == 448
    assert layout.num_scales == 2


def test_segments_are_placed_behind_each_other() -> None:
    segments = (Segment(256, 4, 4), Segment(128, 8, 8), Segment(64, 16, 16))
    assert list(LinearLayout(64, segments).placed()) == [
        (segments[0], 0, 0),
        (segments[1], 256, 1),
        (segments[2], 384, 2),
    ]
    outliers_first = (Segment(64, 16, 16), Segment(128, 16, 4))
    assert [place[1:] for place in LinearLayout(64, outliers_first).placed()] == [(0, 0), (64, 0)]


def test_group_scales_count_groups() -> None:
    assert LinearLayout(64, (Segment(512, 16, 4),), group_size=128).num_scales == 4


def test_forced_activation_bits() -> None:
    layout = LinearLayout(
        64, (Segment(256, 4, 4), Segment(128, 8, 8), Segment(64, 16, 16)), (0.9, 2.5), False, hadamard=64
    )
    assert layout.at("map") is layout
    assert [s.act_bits for s in layout.at("a8").segments] == [8, 8, 16]
    assert [s.act_bits for s in layout.at("a16").segments] == [16, 16, 16]
    for act in ("a8", "a16"):
        forced = layout.at(act)
        assert [(s.width, s.weight_bits) for s in forced.segments] == [(256, 4), (128, 8), (64, 16)]
        assert (forced.out_features, forced.clip, forced.symmetric, forced.hadamard) == (64, (0.9, 2.5), False, 64)
        assert forced.num_scales == layout.num_scales
