"""The tuning table: what it says is found, and what it does not say has a plan that fits the hardware."""

from __future__ import annotations

import json

import pytest

from w4a4.kernels.gemm_sm90_variant import MAX_SHARED_BYTES, Plan, Variant
from w4a4.kernels.tuning_sm90 import TABLE, choose, default_plan, entry, parse, variants

BITS = [(4,), (8,), (4, 8), (4, 4)]


def test_entries_survive_the_file() -> None:
    small = Plan(Variant((4, 8), 16, 2, 2, 5, int4_blocks=2, weights_once=True, shares_tiles=True), 1, "all")
    large = Plan(Variant((4, 8), 256, 2, 2, 4, packs_first=True), 8)
    lines = [entry((4, 8), 4096, 8192, 8192, large, 321.123), entry((4, 8), 4096, 8192, 16, small, 5.4)]
    table = parse(json.loads(json.dumps({"gpu": "any", "plans": lines})))
    assert table == {((4, 8), 4096, 8192): [(16, small), (8192, large)]}
    assert lines[0]["us"] == 321.12 and "int4_blocks" not in lines[0]["variant"]


def test_the_table_is_used_up_to_its_tokens() -> None:
    table = parse(json.loads(TABLE.read_text()))
    for (bits, rows, columns), entries in table.items():
        limits = [limit for limit, _ in entries]
        assert limits == sorted(set(limits))
        for limit, plan in entries:
            assert choose(bits, rows, columns, limit) == plan
        assert choose(bits, rows, columns, limits[-1] + 1) == default_plan(bits, limits[-1] + 1)


@pytest.mark.parametrize("bits", BITS)
def test_a_plan_wastes_little_and_fits(bits: tuple[int, ...]) -> None:
    for tokens in (1, 8, 9, 16, 17, 33, 64, 65, 256, 257, 4097, 100_000):
        plan = choose(bits, 64, 64, tokens)
        variant = plan.variant
        assert variant.weight_bits == bits and variant.shared_bytes <= MAX_SHARED_BYTES
        assert variant.tokens >= min(tokens, 128) and (
            variant.tokens <= 2 * tokens or variant.tokens <= 16 or tokens > 16
        )
        assert plan.share == "none" or variant.shares_tiles
        assert variant in variants()


def test_impossible_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        Variant((4,), 256, 2, 2, 6)
    with pytest.raises(ValueError, match="no tile"):
        Variant((4,), 12, 2, 2, 4)
    with pytest.raises(ValueError, match="no second segment"):
        Variant((4,), 64, 2, 2, 4, packs_first=True)
    with pytest.raises(ValueError, match="no room for the sums of two segments"):
        Variant((4, 8), 64, 2, 2, 4, packs_first=True, shares_tiles=True)


def test_output_waits_in_stages_only_where_int4_weights_leave_room() -> None:
    dual = Variant((4, 8), 256, 2, 2, 4, packs_first=True)
    assert dual.lends_stages and dual.buffers_in_turn == 2
    chunk = dual.store_tokens * 128
    assert dual.row_blocks * dual.step_words(0) * 4 == chunk  # from the start of a stage: a chunk's place begins behind
    assert dual.stage_words * 4 == 2 * chunk
    stages = dual.stages * (dual.stage_words * 4 + dual.stage_x_bytes)
    assert dual.store_slots * chunk == stages + dual.warpgroups * chunk
    for other in (
        Variant((4, 4), 256, 2, 2, 4, packs_first=True),
        Variant((4, 8), 128, 2, 2, 4),
        Variant((4,), 256, 2, 2, 4, store_buffers=2),
    ):
        assert not other.lends_stages
        assert other.store_slots == other.warpgroups * other.buffers_in_turn


def test_sums_are_cleared_where_a_tile_may_begin_inside_or_with_an_offset() -> None:
    packed, plain = Variant((4, 8), 256, 2, 2, 4, packs_first=True), Variant((4, 8), 128, 2, 2, 4)
    shared = Variant((4, 8), 64, 2, 2, 4, shares_tiles=True)
    cleared = [[not variant.overwrites(segment) for segment in (0, 1)] for variant in (packed, plain, shared)]
    assert cleared == [[True, False], [False, False], [True, True]]
