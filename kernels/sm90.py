"""The Hopper path: our quantise and GEMM kernels, and what runs of a layout that they do not take.

`prepack_sm90.unsupported` and `quantize_sm90_variant.unsupported` say what they do not take. A linear outside the GEMM
(16-bit activations, QUIK's 16-bit outliers and zero points, group scales) is dequantised to bf16 once, at load, and
multiplied by cuBLAS; an activation outside the quantise kernels is quantised by PyTorch operations. `path` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.kernels import prepack_sm90, quantize_sm90
from w4a4.kernels.gemm_sm90 import gemm, lanes
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.prepack_sm90 import PrepackedLinear, prepack
from w4a4.kernels.quantize_sm90_variant import unsupported as unquantizable
from w4a4.kernels.reference import QuantizedActivation, dequantize_weight, rms_norm
from w4a4.kernels.reference import quantize_activation as quantize_reference

ACTIVATION_DTYPES = (torch.bfloat16,)
OUT_DTYPE = torch.bfloat16


def path(layout: LinearLayout) -> str:
    """The name of what runs. On Hopper 4-bit activations are int8 lanes too: "int8-wgmma sm_90 (w4a4+w8a8)"."""
    bits = "+".join(f"w{segment.weight_bits}a{segment.act_bits}" for segment in layout.segments)
    reason = prepack_sm90.unsupported(layout)
    if reason:
        return f"bf16-cublas sm_90 ({bits}, dequantised at load: no int8 kernel for {reason})"
    reason = unquantizable(layout)
    if reason:
        return f"int8-wgmma sm_90 ({bits}, quantised by PyTorch: no kernel for {reason})"
    return f"int8-wgmma sm_90 ({bits})"


def code_columns(layout: LinearLayout) -> int:
    """Columns of a quantised activation's codes: the integer segments side by side, not padded."""
    return sum(segment.width for segment in layout.segments if segment.act_bits < 16)


def prepare_weights(
    layout: LinearLayout,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    bias: Tensor | None,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(words, rows) of `PrepackedLinear`, or one bf16 [N, K] for a layout that the GEMM does not run. No row sums."""
    if not prepack_sm90.unsupported(layout):
        packed = prepack(layout, weights, weight_scales, bias, device)
        return (packed.words, packed.rows), None
    dense = torch.empty(layout.out_features, layout.in_features, dtype=torch.bfloat16, device=device)
    scales = weight_scales.to(device)
    for (segment, column, scale_index), weight in zip(layout.placed(), weights, strict=True):
        part = dequantize_weight(weight.to(device), scales, layout, column, scale_index, segment.weight_bits)
        dense[:, column : column + segment.width] = part
    return (dense,), None


def quantize(x: Tensor, layout: LinearLayout, perm: Tensor | None) -> QuantizedActivation:
    """Quantise x bf16 [T, K]. Codes and scales are the reference's as `gemm_sm90.lanes` puts them."""
    if unquantizable(layout):
        return _in_lanes(quantize_reference(x.float(), layout, perm), layout)
    codes, scales = quantize_sm90.quantize(x, layout, perm)
    return QuantizedActivation(codes, scales, None, None)


def rmsnorm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, layout: LinearLayout, perm: Tensor | None
) -> tuple[Tensor, QuantizedActivation]:
    """x + residual in bf16, and the `quantize` of its RMSNorm; float32 between."""
    if unquantizable(layout):
        hidden = x if residual is None else x + residual
        normalized = rms_norm(hidden.float(), None if weight is None else weight.float(), eps)
        return hidden, _in_lanes(quantize_reference(normalized, layout, perm), layout)
    hidden, codes, scales = quantize_sm90.rmsnorm_quantize(x, residual, weight, eps, layout, perm)
    return hidden, QuantizedActivation(codes, scales, None, None)


def silu_mul_quantize(gate_up: Tensor, layout: LinearLayout, perm: Tensor | None) -> QuantizedActivation:
    """The `quantize` of silu(gate) * up, float32 between."""
    if unquantizable(layout):
        gate, up = gate_up.float().chunk(2, dim=1)
        return _in_lanes(quantize_reference(torch.nn.functional.silu(gate) * up, layout, perm), layout)
    codes, scales = quantize_sm90.silu_mul_quantize(gate_up, layout, perm)
    return QuantizedActivation(codes, scales, None, None)


def _in_lanes(activation: QuantizedActivation, layout: LinearLayout) -> QuantizedActivation:
    """What PyTorch quantised, as the GEMM takes it; 16-bit channels rounded."""
    if prepack_sm90.unsupported(layout) is None:
        return QuantizedActivation(*lanes(activation.codes, activation.scales, layout), None, None)
    rest = activation.unquantized
    return QuantizedActivation(
        activation.codes, activation.scales, activation.zeros, None if rest is None else rest.to(OUT_DTYPE)
    )


def linear(
    activation: QuantizedActivation,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    row_sums: Tensor | None,
    bias: Tensor | None,
    layout: LinearLayout,
) -> Tensor:
    """`reference.w4ax_gemm` in bf16 [T, N], with weights from `prepare_weights`.

    Through the GEMM, sums are exact and a token's result does not depend on its batch. Through cuBLAS, operands are
    rounded to bf16 and its order of summation may change with T.
    """
    if len(weights) == 2:
        words, rows = weights
        return gemm(activation.codes, activation.scales, PrepackedLinear(layout, words, rows)).contiguous()
    (dense,) = weights
    x = _dequantized(activation, layout)
    return torch.nn.functional.linear(x, dense, None if bias is None else bias.to(OUT_DTYPE))


def _dequantized(activation: QuantizedActivation, layout: LinearLayout) -> Tensor:
    """The activation as bf16 [T, K] in stored order."""
    parts = []
    code_start = float_start = index = 0
    for segment in layout.segments:
        if segment.act_bits == 16:
            assert activation.unquantized is not None
            parts.append(activation.unquantized[:, float_start : float_start + segment.width])
            float_start += segment.width
            continue
        codes = activation.codes[:, code_start : code_start + segment.width].float()
        if activation.zeros is not None:
            codes = codes - activation.zeros[:, index, None]
        parts.append((codes * activation.scales[:, index, None]).to(OUT_DTYPE))
        code_start += segment.width
        index += 1
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
