"""`serve.bench.gemm_tuning` without a GPU: what it would time, and that its table is what the kernels read."""

from __future__ import annotations

import json

import pytest

from w4a4.kernels.gemm_sm90 import schedule
from w4a4.kernels.layout import Segment
from w4a4.kernels.prepack_sm90 import padded_width
from w4a4.kernels.tuning_sm90 import entry, parse
from w4a4.serve.bench.gemm_tuning import (
    LAYERS,
    SHAPES,
    TUNED_TOKENS,
    candidates,
    layout_of,
    merge,
    tuned_variants,
    write_lines,
)

SHAPE_LIST = [shape for layers in SHAPES.values() for shape in layers.values()]


def test_layouts() -> None:
    assert layout_of("w4", 128, 1024).segments == (Segment(1024, 4, 4),)
    assert layout_of("dual", 128, 1024).segments == (Segment(896, 4, 4), Segment(128, 8, 8))
    assert layout_of("dual-a8", 128, 1024).segments == (Segment(896, 8, 4), Segment(128, 8, 8))


@pytest.mark.parametrize("name", ["w4", "dual"])
def test_every_candidate_can_run_every_shape(name: str) -> None:
    for n, k in SHAPE_LIST:
        segments = layout_of(name, n, k).segments
        blocks = tuple(padded_width(s.width, s.weight_bits) // 128 for s in segments)
        bits = tuple(segment.weight_bits for segment in segments)
        for limit, tokens in TUNED_TOKENS.items():
            assert tokens <= limit
            plans = candidates(bits, tokens)
            assert len(set(plans)) == len(plans) >= 2
            for plan in plans:
                launch = schedule(blocks, n // 64, tokens, plan, 132)
                assert 1 <= launch.clusters * plan.variant.cluster <= 132


def test_what_is_timed_is_compiled() -> None:
    wanted = {
        plan.variant for bits in ((4,), (4, 8)) for tokens in TUNED_TOKENS.values() for plan in candidates(bits, tokens)
    }
    assert set(tuned_variants()) == wanted


def test_a_written_table_chooses_what_was_measured() -> None:
    plans = {limit: candidates((4, 8), tokens)[-1] for limit, tokens in TUNED_TOKENS.items()}
    lines = [entry((4, 8), 6144, 4096, limit, plan, 12.345) for limit, plan in plans.items()]
    text = write_lines({"gpu": "some GPU", "plans": lines}, "plans")
    assert text.count("\n") == len(lines) + 2  # a line each
    assert parse(json.loads(text)) == {((4, 8), 6144, 4096): sorted(plans.items())}


def test_measured_lines_replace_old_ones() -> None:
    small, large = candidates((4,), 8)[0], candidates((4,), 4096)[0]
    old = [entry((4,), 6144, 4096, 8, small, 5.0), entry((4,), 6144, 4096, 8192, large, 126.0)]
    new = [entry((4,), 6144, 4096, 8192, candidates((4,), 4096)[1], 125.0), entry((4, 8), 6144, 4096, 8, small, 6.0)]
    assert merge(old, new) == [old[0], new[0], new[1]]
    assert all(tuple(layers) == LAYERS for layers in SHAPES.values())
