"""How far a 4-bit activation's scale may fall below the absmax: (c, β) of s = min(c · absmax, β · rms) / 7.

Chosen per linear on a grid, by the error that rounding the inputs makes in the outputs. c trims every token alike, β
trims the tokens with a long tail.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.reference import quantize_symmetric

ABSMAX_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
RMS_FACTORS = (math.inf, 5.0, 4.5, 4.0, 3.75, 3.5, 3.25, 3.0, 2.75, 2.5, 2.25)
_SKETCH_ROWS = 256


def search_clip(
    inputs: Tensor, weight: Tensor, layout: LinearLayout, token_weights: Tensor | None = None
) -> tuple[float, float]:
    """The pair (c, β) with the least sum over tokens of w_t ‖(x_t − Q(x_t)) W₄ᵀ‖² over the 4-bit segments.

    Args:
        inputs: float [T, K] in stored order (transformed). weight: float [N, K] in stored order; linears that share
            their input and so their clip are stacked by rows.
        token_weights: w [T]; 1 if None.

    Beyond 256 outputs the error is measured through a fixed random projection to 256, which keeps it in expectation.
    (1, inf), which is the plain absmax, where nothing runs at 4 bits or activations are asymmetric.

    Raises:
        NumericsError: inputs not finite.
    """
    if not layout.symmetric or all(segment.act_bits != 4 for segment in layout.segments):
        return 1.0, math.inf
    if not torch.isfinite(inputs).all():
        raise NumericsError(f"inputs {tuple(inputs.shape)} of the clip search are not finite")
    parts, start = [], 0
    for segment in layout.segments:
        if segment.act_bits == 4:
            columns = slice(start, start + segment.width)
            parts.append((inputs[:, columns].float(), _sketch(weight[:, columns].float()).T))
        start += segment.width
    importance = torch.ones(inputs.shape[0], device=inputs.device) if token_weights is None else token_weights.float()

    best, best_error = (1.0, math.inf), math.inf
    for c in ABSMAX_FACTORS:
        for beta in RMS_FACTORS:
            output: Tensor | float = 0.0
            for x, projected in parts:
                codes, scale = quantize_symmetric(x, 4, (c, beta))
                output = output + (x - codes.float() * scale[:, None]) @ projected
            assert isinstance(output, Tensor)
            error = float((output.square().sum(1) * importance).sum())
            if error < best_error:
                best, best_error = (c, beta), error
    return best


def _sketch(weight: Tensor) -> Tensor:
    """Random signs times `weight` [N, K], [256, K] over 16: E‖S v‖² = ‖v‖². Unchanged if N <= 256."""
    rows = weight.shape[0]
    if rows <= _SKETCH_ROWS:
        return weight
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (_SKETCH_ROWS, rows), generator=generator).to(weight) * 2 - 1
    return torch.matmul(signs, weight) / math.sqrt(_SKETCH_ROWS)
