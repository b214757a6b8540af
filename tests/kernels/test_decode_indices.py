"""A decode step's indices computed in one launch equal those that `KVBatch` defines."""

from __future__ import annotations

import pytest
import torch

from w4a4.kernels.kv4 import KVBatch, KVPageLayout
from w4a4.kernels.rope import rope_tables

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_sinks", [0, 4])
def test_equal_the_law(count: int, num_sinks: int) -> None:
    from w4a4.kernels.decode_indices import decode_indices
    from w4a4.kernels.kv4_sm90 import _tile_ends

    generator = torch.Generator().manual_seed(count)
    layout = KVPageLayout(8, 128, 16, 4, num_sinks)
    lengths = torch.randint(1, 1000, (count,), generator=generator).to(torch.int32)
    special = torch.tensor([17, 0, 3, 16], dtype=torch.int32)[:count]  # empty, a sink, ends of a page
    lengths[: len(special)] = special
    tables = torch.randint(0, 100_000, (count, 70), generator=generator).to(torch.int32)
    sinks = torch.randint(0, 99_999, (count,), generator=generator).to(torch.int32) if num_sinks else None
    starts = torch.arange(count + 1, dtype=torch.int32)
    batch = KVBatch(tables, starts, lengths, sinks)
    rotary = rope_tables(torch.arange(2000), torch.rand(64, generator=generator), 1.0)
    got = decode_indices(
        lengths.cuda(),
        tables.cuda(),
        None if sinks is None else sinks.cuda(),
        (rotary[0].cuda(), rotary[1].cuda()),
        layout,
    )
    positions = batch.positions.clamp(min=0)
    assert torch.equal(got.slots.cpu(), batch.slots(layout))
    assert torch.equal(got.tile_ends.cpu(), _tile_ends(batch, None))
    assert torch.equal(got.cos.cpu(), rotary[0][positions]) and torch.equal(got.sin.cpu(), rotary[1][positions])
    expected = batch.sink_slots(layout)
    assert (got.sink_slots is None) == (expected is None)
    if got.sink_slots is not None and expected is not None:
        assert torch.equal(got.sink_slots.cpu(), expected)
