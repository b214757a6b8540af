from __future__ import annotations

import json
from pathlib import Path

import pytest

from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.summary import LinearSummary, summarize_checkpoint
from w4a4.kernels.layout import Segment


def test_bits_and_shares_of_a_known_checkpoint(written: Path) -> None:
    summary = summarize_checkpoint(open_checkpoint(written))
    # Per layer 320 rows of (48 at 4x4 + 16 at 8x8), o_proj 64 x 64 and down_proj 64 x 96 at 4x4.
    macs_8 = 320 * 16
    macs_4 = 320 * 48 + 64 * 64 + 64 * 96
    assert summary.num_weights == 2 * (macs_4 + macs_8)
    assert summary.mac_share_4bit == pytest.approx(macs_4 / (macs_4 + macs_8))
    assert summary.mac_shares == pytest.approx({"4x4": 5 / 6, "8x8": 1 / 6})
    assert summary.weight_bits == pytest.approx(4 * 5 / 6 + 8 / 6)
    assert summary.act_bits == pytest.approx(summary.weight_bits)
    assert summary.kv_bits == 4


def test_bytes_add_up_to_the_tensors(written: Path) -> None:
    checkpoint = open_checkpoint(written)
    summary = summarize_checkpoint(checkpoint)
    total = sum(entry.num_bytes for entry in checkpoint.entries.values())
    assert summary.packed_bytes + summary.unquantized_bytes == total
    # embeddings and head, final norm, and per layer two norms and the mean of K
    assert summary.unquantized_bytes == 2 * 40 * 64 * 2 + 64 * 2 + 2 * (2 * 64 * 2 + 32 * 4)
    first = summary.linears[0]
    # q_proj: int4, int8, two scales a row, four blocks, clip, order, shape
    assert first.stored_bytes == 64 * 24 + 64 * 16 + 64 * 2 * 4 + 4 + 8 + 64 * 4 + 16
    assert summary.stored_bits == pytest.approx(8 * summary.packed_bytes / summary.num_weights)


def test_json_names_every_linear(written: Path) -> None:
    document = json.loads(json.dumps(summarize_checkpoint(open_checkpoint(written)).to_json()))
    assert len(document["linears"]) == 14
    assert document["linears"][0]["name"] == "model.layers.0.self_attn.q_proj"
    assert document["linears"][0]["segments"] == [
        {"width": 48, "act_bits": 4, "weight_bits": 4},
        {"width": 16, "act_bits": 8, "weight_bits": 8},
    ]


def test_shares_of_one_linear() -> None:
    linear = LinearSummary("x", 10, 100, (Segment(80, 4, 4), Segment(16, 8, 4), Segment(4, 16, 16)), 0)
    assert (linear.mac_share(4, 4), linear.mac_share(8, 4), linear.mac_share(8, 8)) == (0.8, 0.16, 0.0)
    assert linear.weight_bits == pytest.approx((96 * 4 + 4 * 16) / 100)
    assert linear.act_bits == pytest.approx((80 * 4 + 16 * 8 + 4 * 16) / 100)
