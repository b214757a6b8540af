"""int4 codes as they stand in a checkpoint: eight to an int32 word, least significant nibble first, as u = q + 8.

These are the bytes of compressed-tensors' `pack-quantized`. Layouts that a kernel wants are made from these at load
time, beside the kernel that reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHIFTS = tuple(range(0, 32, 4))


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes [N, K] (int8, in [-8, 7], K a multiple of 8) into int32 words [N, K / 8].

    Raises:
        ValueError: a code out of range, or K not a multiple of 8.
    """
    if codes.ndim != 2 or codes.shape[1] % 8:
        raise ValueError(f"pack_int4 needs [N, K] with K a multiple of 8, got {tuple(codes.shape)}")
    if codes.numel() and (codes.min() < -8 or codes.max() > 7):
        raise ValueError(f"int4 codes must lie in [-8, 7], got {int(codes.min())} to {int(codes.max())}")
    nibbles = (codes.to(torch.int64) + 8).view(codes.shape[0], codes.shape[1] // 8, 8)
    words = sum(nibbles[..., i] << shift for i, shift in enumerate(_SHIFTS))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """Unpack int32 words [N, K / 8] into int8 codes [N, K] in [-8, 7]; the inverse of `pack_int4`."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles - 8).to(torch.int8).flatten(-2)
