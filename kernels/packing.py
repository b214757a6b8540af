"""int4 codes as they stand in a checkpoint: eight to an int32 word, least significant nibble first, as u = q + 8.

These are the bytes of compressed-tensors' `pack-quantized`. Layouts that a kernel wants are made from these at load
time, beside the kernel that reads them. Words are little-endian here as in the file: each byte holds two codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes [N, K] (int8, in [-8, 7], K a multiple of 8) into int32 words [N, K / 8].

    Raises:
        ValueError: a code out of range, or K not a multiple of 8.
    """
    if codes.ndim != 2 or codes.shape[1] % 8:
        raise ValueError(f"pack_int4 needs [N, K] with K a multiple of 8, got {tuple(codes.shape)}")
    if codes.numel() and (codes.min() < -8 or codes.max() > 7):
        raise ValueError(f"int4 codes must lie in [-8, 7], got {int(codes.min())} to {int(codes.max())}")
    nibbles = (codes + 8).contiguous().view(torch.uint8).flatten()
    return (nibbles[::2] | (nibbles[1::2] << 4)).view(torch.int32).view(codes.shape[0], codes.shape[1] // 8)


def unpack_int4(words: Tensor) -> Tensor:
    """Unpack int32 words [N, K / 8] into int8 codes [N, K] in [-8, 7]; the inverse of `pack_int4`."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 0xF, pairs >> 4), 2).flatten(1).view(torch.int8) - 8
