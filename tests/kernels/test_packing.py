"""`kernels.packing`: the bytes of a checkpoint's int4 codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w4a4.kernels.packing import pack_int4, unpack_int4


def test_byte_order_by_hand() -> None:
    """Codes -8..-1 are nibbles 0..7, least significant first: bytes 0x10 0x32 0x54 0x76; 7..0 are 15..8."""
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1], [7, 6, 5, 4, 3, 2, 1, 0]], dtype=torch.int8)
    words = pack_int4(codes)
    assert words.dtype == torch.int32 and words.shape == (2, 1)
    assert words[:, 0].tolist() == [0x76543210, 0x89ABCDEF - 2**32]
    assert words.view(torch.uint8)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert words.view(torch.uint8)[1].tolist() == [0xEF, 0xCD, 0xAB, 0x89]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 5), words=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_unpack_inverts_pack(rows: int, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, 8 * words), dtype=torch.int8, generator=generator)
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=12))
def test_pack_inverts_unpack(values: list[int]) -> None:
    """Every word is the pack of its own unpack, so the two are one-to-one."""
    words = torch.tensor([values], dtype=torch.int32)
    codes = unpack_int4(words)
    assert codes.min() >= -8 and codes.max() <= 7
    assert torch.equal(pack_int4(codes), words)


@pytest.mark.parametrize("shape", [(8,), (2, 7), (1, 2, 8)])
def test_shapes_that_do_not_fill_words(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_int4(torch.zeros(shape, dtype=torch.int8))


@pytest.mark.parametrize("value", [-9, 8])
def test_codes_out_of_range(value: int) -> None:
    codes = torch.zeros(1, 8, dtype=torch.int8)
    codes[0, 3] = value
    with pytest.raises(ValueError, match=r"\[-8, 7\]"):
        pack_int4(codes)
