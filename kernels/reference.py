"""The law: what each operation means, in PyTorch that runs on a CPU.

A kernel's int32 accumulators equal these bit for bit; its outputs are within bf16 rounding. Integer products are
computed through float32 GEMMs where every partial sum is below 2**24 and therefore exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.kernels.layout import LinearLayout

INT4_MAX = 7
INT8_MAX = 127


@dataclass(frozen=True)
class QuantizedActivation:
    """A linear's input after quantisation, channels in stored order.

    codes:   int8  [T, K_int], the integer segments side by side ([-8, 7] where activations have 4 bits; [0, 15] - 8
             where they are asymmetric)
    scales:  f32   [T, S], one per integer segment
    zeros:   f32   [T, S] or None: x = scale * (code - zero) where activations are asymmetric
    unquantized: [T, K16] or None: channels that stay in 16 bit or more
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    unquantized: Tensor | None


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(size), float32 [size, size]: orthogonal and symmetric."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Sylvester Hadamard matrix needs a power of two, got {size}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / float(size**0.5)


def block_hadamard(x: Tensor, block: int) -> Tensor:
    """Multiply every run of `block` channels of x [..., K] by the normalised Hadamard matrix; K % block == 0.

    A butterfly: log2(block) stages of sums and differences at distance 1, 2, 4, ..., then one product with
    1 / sqrt(block), in float32 or wider. The order of its additions is part of the law: it is what a kernel does, and
    it does not depend on how many rows are transformed together.
    """
    if block == 1:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a block Hadamard needs a power of two that divides {x.shape[-1]} channels, got {block}")
    y = x if x.dtype == torch.float64 else x.float()
    distance = 1
    while distance < block:
        low, high = y.reshape(x.numel() // (2 * distance), 2, distance).unbind(1)
        y = torch.cat([low + high, low - high], 1)
        distance *= 2
    return y.view(x.shape) * float(block**-0.5)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., H] / sqrt(mean(x²) + eps), times `weight` [H] if given; the mean in float32."""
    normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return normalized.to(x.dtype) if weight is None else weight * normalized.to(x.dtype)


def quantize_symmetric(x: Tensor, bits: int, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Per-token symmetric quantisation of one segment x [T, K] -> codes int8 [T, K], scale f32 [T].

    8 bits: s = absmax / 127. 4 bits: s = min(c * absmax, beta * rms) / 7 with clip = (c, beta). An all-zero token
    has scale 0 and codes 0.
    """
    x = x.float()
    absmax = x.abs().amax(-1)
    if bits == 8:
        limit, scale = INT8_MAX, absmax / INT8_MAX
    else:
        c, beta = clip
        bound = c * absmax
        if beta != float("inf"):
            bound = torch.minimum(bound, beta * x.pow(2).mean(-1).sqrt())
        limit, scale = INT4_MAX, bound / INT4_MAX
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    low = -8 if bits == 4 else -INT8_MAX
    codes = torch.round(x * inverse.unsqueeze(-1)).clamp(low, limit)
    return codes.to(torch.int8), scale


def quantize_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """QUIK's per-token asymmetric 4-bit quantisation of x [T, K]: codes int8 in [-8, 7], scale and zero f32 [T].

    x is approximated by scale * (code - zero).
    """
    x = x.float()
    low, high = x.amin(-1), x.amax(-1)
    scale = (high - low) / 15
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    zero = torch.where(scale > 0, -8 - low * inverse, torch.zeros_like(scale))
    codes = torch.round(x * inverse.unsqueeze(-1) + zero.unsqueeze(-1)).clamp(-8, 7)
    return codes.to(torch.int8), scale, zero


def quantize_activation(x: Tensor, layout: LinearLayout, perm: Tensor | None = None) -> QuantizedActivation:
    """Permute, transform, cut into segments and quantise x [T, K] (QUIK section 3.2, COMET section 4.1).

    Order: channels are put in stored order by `perm` (int [K], stored channel j reads input channel perm[j]), then the
    block Hadamard runs over stored order, then each segment gets its own per-token scale.
    """
    if x.ndim != 2 or x.shape[1] != layout.in_features:
        raise ValueError(f"activation must be [T, {layout.in_features}], got {tuple(x.shape)}")
    if perm is not None:
        x = x.index_select(1, perm)
    x = block_hadamard(x, layout.hadamard)
    codes, scales, zeros, rest = [], [], [], None
    parts = torch.split(x, [segment.width for segment in layout.segments], dim=1)
    for segment, part in zip(layout.segments, parts, strict=True):
        if segment.act_bits == 16:
            rest = part if rest is None else torch.cat([rest, part], 1)
            continue
        if segment.act_bits == 4 and not layout.symmetric:
            code, scale, zero = quantize_asymmetric(part)
        else:
            code, scale = quantize_symmetric(part, segment.act_bits, layout.clip)
            zero = torch.zeros_like(scale)
        codes.append(code)
        scales.append(scale)
        zeros.append(zero)
    tokens = x.shape[0]
    return QuantizedActivation(
        codes=torch.cat(codes, 1) if codes else torch.empty(tokens, 0, dtype=torch.int8, device=x.device),
        scales=torch.stack(scales, 1) if scales else torch.empty(tokens, 0, device=x.device),
        zeros=None if layout.symmetric or not zeros else torch.stack(zeros, 1),
        unquantized=rest,
    )


def integer_matmul(codes: Tensor, weight: Tensor) -> Tensor:
    """Exact int32 product of int8 codes [T, K] with int8 weight [N, K], returned as int32 [T, N].

    Split so that each float32 partial sum stays below 2**24: 1,024 columns of int8 x int8.
    """
    out = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.int32, device=codes.device)
    for start in range(0, codes.shape[1], 1024):
        stop = start + 1024
        out += (codes[:, start:stop].float() @ weight[:, start:stop].float().T).to(torch.int32)
    return out


def w4ax_gemm(
    activation: QuantizedActivation,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    layout: LinearLayout,
    bias: Tensor | None = None,
    matmul: Callable[[Tensor, Tensor], Tensor] = integer_matmul,
) -> Tensor:
    """y[t, n] = sum over segments of s_x[t, seg] * s_w[n, seg] * sum_k (q_x - z_x) q_w, + 16-bit columns, + bias.

    Args:
        weights: one [N, width] tensor per segment in stored order: int8 codes, or float for 16-bit outlier columns.
        weight_scales: f32 [N, layout.num_scales].
        bias: [N] or None.
        matmul: the exact integer product.
    Returns: float32 [T, N].
    """
    tokens = activation.codes.shape[0] if activation.unquantized is None else activation.unquantized.shape[0]
    y = torch.zeros(tokens, layout.out_features, device=weight_scales.device)
    code_start = float_start = activation_index = 0
    for (segment, column, scale_index), weight in zip(layout.placed(), weights, strict=True):
        if segment.act_bits < 16:
            codes = activation.codes[:, code_start : code_start + segment.width]
            product = matmul(codes, weight).float()
            if activation.zeros is not None:
                row_sums = weight.sum(1, dtype=torch.int32).float()
                product = product - activation.zeros[:, activation_index, None] * row_sums
            y += activation.scales[:, activation_index, None] * weight_scales[:, scale_index] * product
            code_start += segment.width
            activation_index += 1
        else:
            assert activation.unquantized is not None
            x = activation.unquantized[:, float_start : float_start + segment.width].float()
            y += x @ dequantize_weight(weight, weight_scales, layout, column, scale_index, segment.weight_bits).T
            float_start += segment.width
    return y if bias is None else y + bias.float()


def dequantize_weight(
    weight: Tensor, scales: Tensor, layout: LinearLayout, column: int, index: int, bits: int
) -> Tensor:
    """Float32 weight [N, width] of one segment that starts at `column` and owns the scale at `index`."""
    if bits == 16:
        return weight.float()
    if layout.group_size:
        groups = scales[:, column // layout.group_size : (column + weight.shape[1]) // layout.group_size]
        return weight.float() * groups.repeat_interleave(layout.group_size, 1)
    return weight.float() * scales[:, index, None]


def dense_weight(
    weights: tuple[Tensor, ...], weight_scales: Tensor, layout: LinearLayout, perm: Tensor | None
) -> Tensor:
    """The float32 weight [N, K] that a stored linear stands for, columns in the order of its input: y = x Wᵀ + b.

    Stored columns multiply H x[perm], so W[:, perm] = W_stored H (H is symmetric, block-diagonal in stored order).
    Weights and scales as in `w4ax_gemm`; perm int [K] or None.
    """
    parts = [
        dequantize_weight(weight, weight_scales, layout, column, scale_index, segment.weight_bits)
        for (segment, column, scale_index), weight in zip(layout.placed(), weights, strict=True)
    ]
    stored = block_hadamard(torch.cat(parts, 1), layout.hadamard)
    if perm is None:
        return stored
    dense = torch.empty_like(stored)
    dense[:, perm.long()] = stored
    return dense


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KV4: asymmetric uint4 per token and kv-head over x [..., D]: codes uint8 [..., D], scale and zero f16 [...].

    x is approximated by scale * code + zero: the zero point is kept in real units, so that a constant vector has scale
    0 and is exact. Codes are computed with the float16 values that are stored.
    """
    x = x.float()
    low, high = x.amin(-1), x.amax(-1)
    scale, zero = ((high - low) / 15).half(), low.half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), torch.zeros_like(low))
    codes = torch.round((x - zero.float().unsqueeze(-1)) * inverse.unsqueeze(-1)).clamp(0, 15)
    return codes.to(torch.uint8), scale, zero


def dequantize_kv(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The inverse of `quantize_kv` up to rounding: float32 [..., D]."""
    return codes.float() * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
