"""How far a 4-bit activation's scale may fall below the absmax: (c, β) of s = min(c · absmax, β · rms) / 7.

Chosen per linear, by the error that rounding the inputs makes in the outputs. c trims every token alike, β
trims the tokens with a long tail.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.reference import INT4_MAX

ABSMAX_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
RMS_FACTORS = (math.inf, 5.0, 4.5, 4.0, 3.75, 3.5, 3.25, 3.0, 2.75, 2.5, 2.25)
_SKETCH_ROWS = 128


def search_clip(
    inputs: Tensor, weight: Tensor, layout: LinearLayout, token_weights: Tensor | None = None
) -> tuple[float, float]:
    """The pair (c, β) with the least sum over tokens of w_t ‖(x_t − Q(x_t)) W₄ᵀ‖² over the 4-bit segments.

    Args:
        inputs: float [T, K] in stored order (transformed). weight: float [N, K] in stored order; linears that share
            their input and so their clip are stacked by rows.
        token_weights: w [T]; 1 if None.

    Searched along β, then c, then β again. Beyond 128 outputs the error is measured through a fixed random projection
    to 128, which keeps it in expectation.
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
            parts.append(_Part(inputs[:, columns].float(), _sketch(weight[:, columns].float()).T))
        start += segment.width
    importance = torch.ones(inputs.shape[0], device=inputs.device) if token_weights is None else token_weights.float()

    errors: dict[tuple[float, float], float] = {}

    together = len(RMS_FACTORS) if inputs.is_cuda else 1

    def best(clips: list[tuple[float, float]]) -> tuple[float, float]:
        missing = [clip for clip in clips if clip not in errors]
        for start in range(0, len(missing), together):
            some = missing[start : start + together]
            outputs = torch.stack([part.output_errors(some) for part in parts]).sum(0)
            sums = torch.stack([(output.square().sum(1) * importance).sum() for output in outputs])
            errors.update(zip(some, sums.tolist(), strict=True))
        return min(clips, key=errors.__getitem__)

    _, beta = best([(1.0, beta) for beta in RMS_FACTORS])
    c, _ = best([(c, beta) for c in ABSMAX_FACTORS])
    return best([(c, beta) for beta in RMS_FACTORS])


class _Part:
    """One 4-bit segment: its inputs [T, K4], what both clip rules start from, and the projected weight [K4, R]."""

    def __init__(self, x: Tensor, projected: Tensor) -> None:
        self.x, self.projected = x, projected
        self.absmax, self.rms = x.abs().amax(1), x.square().mean(1).sqrt()

    def output_errors(self, clips: list[tuple[float, float]]) -> Tensor:
        """(Q(x) - x) times the projected weight, [C, T, R]; Q as `kernels.reference.quantize_symmetric` has it."""
        bounds = []
        for c, beta in clips:
            bound = c * self.absmax
            bounds.append(bound if beta == math.inf else torch.minimum(bound, beta * self.rms))
        scale = (torch.stack(bounds) / INT4_MAX)[:, :, None]
        inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
        rounded = (self.x * inverse).round_().clamp_(-8, INT4_MAX).mul_(scale)
        return rounded.sub_(self.x) @ self.projected


def _sketch(weight: Tensor) -> Tensor:
    """Random signs times `weight` [N, K], [128, K] over sqrt(128): E‖S v‖² = ‖v‖². Unchanged if N <= 128."""
    rows = weight.shape[0]
    if rows <= _SKETCH_ROWS:
        return weight
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (_SKETCH_ROWS, rows), generator=generator).to(weight) * 2 - 1
    return torch.matmul(signs, weight) / math.sqrt(_SKETCH_ROWS)
