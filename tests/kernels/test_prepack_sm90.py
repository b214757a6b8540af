"""Prepacking for Hopper: every code lands where the fragment layout says, and nothing is lost."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.prepack_sm90 import fragments_int4, fragments_int8, padded_width, prepack, unsupported


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def element(block_row: int, block_column: int, slab: int, thread: int, register: int, byte: int) -> tuple[int, int]:
    """Row and column that the wgmma A fragment (PTX, m64k32, 8-bit types) gives to a byte of a thread's register."""
    row = 64 * block_row + 16 * (thread // 32) + thread % 32 // 4 + 8 * (register & 1)
    column = 128 * block_column + 32 * slab + 16 * (register >> 1) + 4 * (thread % 4) + byte
    return row, column


@cache
def example() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes8, codes4 = integers(-127, 127, 128, 384), integers(-8, 7, 128, 384, seed=1)
    return codes8, codes4, fragments_int8(codes8), fragments_int4(codes4)


@settings(max_examples=60, deadline=None)
@given(
    block_row=st.integers(0, 1),
    block_column=st.integers(0, 2),
    slab=st.integers(0, 3),
    thread=st.integers(0, 127),
    register=st.integers(0, 3),
    byte=st.integers(0, 3),
)
def test_registers_hold_what_the_fragment_layout_says(
    block_row: int, block_column: int, slab: int, thread: int, register: int, byte: int
) -> None:
    row, column = element(block_row, block_column, slab, thread, register, byte)
    codes8, codes4, packed8, packed4 = example()
    words8 = packed8[block_row, 2048 * block_column :]
    word = int(words8[512 * slab + 4 * thread + register])
    assert (word >> (8 * byte) & 0xFF) == int(codes8[row, column]) & 0xFF
    words4 = packed4[block_row, 1024 * block_column :]
    word = int(words4[512 * (slab // 2) + 4 * thread + 2 * (slab % 2) + register // 2])
    # as the kernel does it: an even register is shifted up, an odd one masked, and a byte is then 16 times the code
    high = (word << 4 if register % 2 == 0 else word) & 0xF0F0F0F0
    value = high >> (8 * byte) & 0xFF
    assert (value - 256 if value >= 128 else value) == 16 * int(codes4[row, column])


@pytest.mark.parametrize(("pack", "low", "high"), [(fragments_int4, -8, 7), (fragments_int8, -128, 127)])
def test_packing_is_a_bijection(pack: object, low: int, high: int) -> None:
    codes = integers(low, high, 64, 256)
    assert callable(pack)
    packed = pack(codes)
    assert packed.numel() * 32 == codes.numel() * (4 if high == 7 else 8)
    flipped = codes.clone()
    flipped[37, 201] ^= 1
    assert int((pack(flipped) != packed).sum()) == 1  # one code lives in one word
    assert torch.equal(torch.bincount(nibbles_or_bytes(packed, high)), torch.bincount(nibbles_or_bytes(codes, high)))


def nibbles_or_bytes(tensor: Tensor, high: int) -> Tensor:
    """The multiset of codes in packed words or plain codes, as unsigned numbers."""
    if tensor.dtype == torch.int8:
        return tensor.flatten().to(torch.int64) & (0xF if high == 7 else 0xFF)
    raw = tensor.view(torch.uint8).flatten().to(torch.int64)
    return torch.cat([raw & 0xF, raw >> 4]) if high == 7 else raw


def test_padding_scales_and_bias() -> None:
    layout = LinearLayout(72, (Segment(448, 4, 4), Segment(128, 8, 8)))
    weights = (integers(-8, 7, 72, 448), integers(-127, 127, 72, 128))
    scales = torch.rand(72, 2) + 0.1
    bias = torch.randn(72)
    packed = prepack(layout, weights, scales, bias, "cpu")
    assert packed.blocks == (4, 1) and packed.weight_bits == (4, 8)
    assert packed.words.shape == (2, 4 * 1024 + 2048)
    padded4 = torch.nn.functional.pad(weights[0], (0, 64, 0, 56))
    padded8 = torch.nn.functional.pad(weights[1], (0, 0, 0, 56))
    assert torch.equal(packed.words, torch.cat([fragments_int4(padded4), fragments_int8(padded8)], 1))
    expected = torch.stack([scales[:, 0] / 16, scales[:, 1], bias, torch.zeros(72)], 1)
    assert torch.equal(packed.rows[:72], expected) and not packed.rows[72:].any()
    assert packed.weight_bytes == 128 * (512 // 2 + 128)


def test_large_layers_are_packed_in_parts() -> None:
    layout = LinearLayout(4096 + 128, (Segment(256, 4, 4),))
    codes = integers(-8, 7, layout.out_features, 256)
    packed = prepack(layout, (codes,), torch.ones(layout.out_features, 1), None, "cpu")
    assert torch.equal(packed.words, fragments_int4(codes))


def test_widths_are_padded_to_whole_steps() -> None:
    assert [padded_width(w, 4) for w in (64, 256, 448, 576)] == [256, 256, 512, 768]
    assert [padded_width(w, 8) for w in (64, 128, 448)] == [128, 128, 512]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (LinearLayout(64, (Segment(128, 16, 4),)), "16-bit activations"),
        (LinearLayout(64, (Segment(128, 4, 4), Segment(64, 16, 16))), "16-bit activations"),
        (LinearLayout(64, (Segment(128, 4, 4),), symmetric=False), "asymmetric activations"),
        (LinearLayout(64, (Segment(128, 4, 4),) * 3), "3 segments"),
    ],
)
def test_refuses_by_name(layout: LinearLayout, reason: str) -> None:
    assert unsupported(layout) == reason
    with pytest.raises(ValueError, match=reason):
        prepack(layout, tuple(integers(-8, 7, 64, s.width) for s in layout.segments), torch.ones(64, 1), None, "cpu")


def test_refuses_tensors_that_do_not_fit() -> None:
    layout = LinearLayout(64, (Segment(128, 4, 4),))
    with pytest.raises(ValueError, match=r"int8 \[64, 128\]"):
        prepack(layout, (integers(-8, 7, 64, 256),), torch.ones(64, 1), None, "cpu")
    with pytest.raises(ValueError, match=r"weight_scales must be \[64, 1\]"):
        prepack(layout, (integers(-8, 7, 64, 128),), torch.ones(64, 2), None, "cpu")
