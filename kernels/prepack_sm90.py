"""Canonical codes to the order in which Hopper's tensor cores read them: done once, at load, on the GPU.

The GEMM multiplies with the weights as wgmma's A operand *from registers*, so a thread must find its fragment with
plain 16-byte loads. A block of 64 rows x 128 columns is contiguous (4 KiB of int4 or 8 KiB of int8) and is copied to
shared memory in one piece; inside it the words stand in the order in which threads want them. `gemm_sm90` is the
other end of this layout: whoever changes one changes both.

Register r of thread t holds, in byte b, row 16 (t / 32) + (t % 32) / 4 + 8 (r & 1) and column
4 (t % 4) + b + 16 (r >> 1) of a 64 x 32 slab. int8: word r of slab s of thread t is word 512 s + 4 t + r of the block.
int4: the even register of a pair stands in the low nibbles of a word, the odd one in its high nibbles; slab s, pair p
is word 512 (s / 2) + 4 t + 2 (s % 2) + p. A nibble moved to the high half of its byte is 16 times its value, exactly:
the sixteenth is folded into the weight scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.kernels.layout import LinearLayout

ROW_BLOCK = 64  # rows of one wgmma
ROW_TILE = 128  # N is padded to this
COLUMN_BLOCK = 128  # columns of one shared-memory tile
INT4_ALIGN = 256  # columns to which an int4 segment is padded: one stage of the decode kernel
_ROWS_AT_ONCE = 4096  # bounds the working memory of prepacking


@dataclass(frozen=True)
class PrepackedLinear:
    """A linear in the GEMM's order, on one device. Weights are padded with zeros, which makes any activation harmless.

    layout:    the linear's own; `layout.out_features` rows are real, the rest is padding
    words:     int32 [N_padded / 64, words]: per 64 rows the column blocks of the first segment, then of the second
    rows:      f32 [N_padded, 4]: weight scale of the first segment, of the second, bias, 0 (int4 scales over 16)
    """

    layout: LinearLayout
    words: Tensor
    rows: Tensor

    @property
    def weight_bits(self) -> tuple[int, ...]:
        return tuple(segment.weight_bits for segment in self.layout.segments)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Column blocks of 128 of each segment, padding included."""
        return tuple(padded_width(s.width, s.weight_bits) // COLUMN_BLOCK for s in self.layout.segments)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass over the linear reads."""
        return self.words.numel() * 4


def padded_width(width: int, weight_bits: int) -> int:
    """Columns a segment occupies in the GEMM's order."""
    align = INT4_ALIGN if weight_bits == 4 else COLUMN_BLOCK
    return -(-width // align) * align


def prepack(
    layout: LinearLayout,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    bias: Tensor | None = None,
    device: torch.device | str = "cuda",
) -> PrepackedLinear:
    """Put a linear's codes in the GEMM's order on `device`.

    Args:
        weights: int8 codes [N, width] per segment, in stored order; on any device.
        weight_scales: f32 [N, segments].
        bias: [N] or None.
    Raises:
        ValueError: a layout this GEMM does not run (16-bit columns, asymmetric activations, group scales, more than two
            segments), or tensors that do not fit the layout.
    """
    reason = unsupported(layout)
    if reason:
        raise ValueError(f"the sm_90 GEMM does not run {reason}")
    rows_real = layout.out_features
    if len(weights) != len(layout.segments):
        raise ValueError(f"{len(weights)} weight tensors for {len(layout.segments)} segments")
    for segment, codes in zip(layout.segments, weights, strict=True):
        if codes.shape != (rows_real, segment.width) or codes.dtype != torch.int8:
            raise ValueError(
                f"weights must be int8 [{rows_real}, {segment.width}], got {codes.dtype} {tuple(codes.shape)}"
            )
    if weight_scales.shape != (rows_real, len(weights)):
        raise ValueError(f"weight_scales must be [{rows_real}, {len(weights)}], got {tuple(weight_scales.shape)}")
    padded = -(-rows_real // ROW_TILE) * ROW_TILE
    sizes = [
        padded_width(s.width, s.weight_bits) // COLUMN_BLOCK * 256 * s.weight_bits for s in layout.segments
    ]  # words of 64 rows
    words = torch.empty(padded // ROW_BLOCK, sum(sizes), dtype=torch.int32, device=device)
    for start in range(0, padded, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, padded)
        column = 0
        for segment, codes, size in zip(layout.segments, weights, sizes, strict=True):
            part = codes[start : min(stop, rows_real)].to(device)
            width = padded_width(segment.width, segment.weight_bits)
            part = torch.nn.functional.pad(part, (0, width - segment.width, 0, stop - start - part.shape[0]))
            pack = fragments_int4 if segment.weight_bits == 4 else fragments_int8
            words[start // ROW_BLOCK : stop // ROW_BLOCK, column : column + size] = pack(part)
            column += size
    rows = torch.zeros(padded, 4, dtype=torch.float32, device=device)
    for index, segment in enumerate(layout.segments):
        scale = weight_scales[:, index].to(device=device, dtype=torch.float32)
        rows[:rows_real, index] = scale / 16 if segment.weight_bits == 4 else scale
    if bias is not None:
        rows[:rows_real, 2] = bias.to(device=device, dtype=torch.float32)
    return PrepackedLinear(layout, words, rows)


def unsupported(layout: LinearLayout) -> str | None:
    """What of a layout the sm_90 GEMM does not run, or None if it runs it."""
    if any(s.act_bits == 16 for s in layout.segments):
        return "16-bit activations"
    if len(layout.segments) not in (1, 2):
        return f"{len(layout.segments)} segments"
    if not layout.symmetric and any(s.act_bits == 4 for s in layout.segments):
        return "asymmetric activations"
    if layout.group_size:
        return "group scales"
    return None


def fragments_int4(codes: Tensor) -> Tensor:
    """int8 codes [N, K] in [-8, 7], N % 64 == 0 and K % 128 == 0, to words int32 [N / 64, K * 8]."""
    # bytes are unsigned nibble pairs: the code of the even register below, of the odd register above
    low, high = _slabs(codes, 4)
    packed = (low & 0xF) | ((high & 0xF) << 4)  # block, column block, half, warp, g, q, slab of half, pair, byte
    return packed.to(torch.uint8).contiguous().view(torch.int32).view(codes.shape[0] // ROW_BLOCK, -1)


def fragments_int8(codes: Tensor) -> Tensor:
    """int8 codes [N, K], N % 64 == 0 and K % 128 == 0, to words int32 [N / 64, K * 16]."""
    low, high = _slabs(codes, 8)
    registers = torch.stack((low, high), -2)  # ..., pair, register of pair, byte
    return registers.contiguous().view(torch.int32).view(codes.shape[0] // ROW_BLOCK, -1)


def _slabs(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Even and odd registers as [block, column block, (half | slab), warp, g, q, (slab of half), pair, byte]."""
    n, k = codes.shape
    # row = 16 warp + 8 odd + g; column = 128 block + 32 slab + 16 pair + 4 q + byte
    grid = codes.view(n // 64, 4, 2, 8, k // 128, 4, 2, 4, 4)
    even, odd = grid[:, :, 0], grid[:, :, 1]  # block, warp, g, column block, slab, pair, q, byte
    if bits == 8:
        order = (0, 3, 4, 1, 2, 6, 5, 7)  # block, column block, slab, warp, g, q, pair, byte
        return even.permute(order), odd.permute(order)
    # the two slabs of a half stand together, so that a thread's four words are one 16-byte load
    split = (n // 64, 4, 8, k // 128, 2, 2, 2, 4, 4)
    order4 = (0, 3, 4, 1, 2, 7, 5, 6, 8)  # block, column block, half, warp, g, q, slab of half, pair, byte
    return even.reshape(split).permute(order4), odd.reshape(split).permute(order4)
