"""Weight scales and rounding to the integer grid, one scale per row (or per row and group of columns).

Pure functions on float tensors. `gptq.py` uses the same scales and grid and adds error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError

CODE_RANGE = {4: (-8, 7), 8: (-127, 127)}
"""Lowest and highest code of each weight width; scales map the largest magnitude of a row to the highest code."""

_SHRINK = torch.linspace(1.0, 0.4, 49)
_MIN_SCALE = 1e-12
_AT_A_TIME = 2**18  # weights searched at once: what a CPU's cache holds


def row_scales(weight: Tensor, bits: int, hessian_diagonal: Tensor | None = None, search: bool = False) -> Tensor:
    """One positive scale per row of `weight` [N, K] -> float32 [N].

    Without `search`: absmax / 127 (8 bits) or absmax / 7 (4 bits). With `search`, a 4-bit scale is shrunk by the factor
    of a grid (1.0 down to 0.4) that minimises sum_k d_k (w_k - round(w_k))² with d = `hessian_diagonal` [K], which
    is E[x_k²]; ones if None. An all-zero row gets a tiny scale.

    Raises:
        NumericsError: a weight or a diagonal entry is not finite.
    """
    low, high = _code_range(bits)
    _require_finite(weight, "weight")
    weight = weight.float()
    absmax = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    widest = (absmax / high).clamp_min(_MIN_SCALE)
    if not search or bits == 8:
        return widest
    importance = torch.ones(weight.shape[1], device=weight.device)
    if hessian_diagonal is not None:
        _require_finite(hessian_diagonal, "Hessian diagonal")
        importance = hessian_diagonal.to(weight).clamp_min(0)
        importance = importance / importance.mean().clamp_min(1e-30)
    if weight.is_cuda:
        from w4a4.export.scale_search import search_row_scales

        return search_row_scales(weight, widest, importance, _SHRINK, (low, high))
    best = widest.clone()
    rows = max(1, _AT_A_TIME // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        best[part] = _search(weight[part], widest[part], importance, low, high)
    return best


def group_scales(
    weight: Tensor, bits: int, group_size: int, hessian_diagonal: Tensor | None = None, search: bool = False
) -> Tensor:
    """Like `row_scales` for every group of `group_size` columns of `weight` [N, K] -> float32 [N, K / group_size].

    Raises:
        UsageError: K is not a multiple of `group_size`.
    """
    if group_size <= 0 or weight.shape[1] % group_size:
        raise UsageError(
            f"a row of {weight.shape[1]} weights cannot be cut into groups of {group_size}",
            "choose a group size that divides every linear's input width",
        )
    columns = []
    for start in range(0, weight.shape[1], group_size):
        part = slice(start, start + group_size)
        diagonal = None if hessian_diagonal is None else hessian_diagonal[part]
        columns.append(row_scales(weight[:, part], bits, diagonal, search))
    return torch.stack(columns, 1)


def round_to_nearest(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes int8 [N, K] of `weight` [N, K] with `scale` [N] or [N, G] (G groups of equal width)."""
    low, high = _code_range(bits)
    return torch.round(weight.float() / _expand(scale, weight.shape[1])).clamp(low, high).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Weights float32 [N, K] from codes [N, K] and `scale` [N] or [N, G]."""
    return codes.float() * _expand(scale, codes.shape[1])


def _search(weight: Tensor, widest: Tensor, importance: Tensor, low: int, high: int) -> Tensor:
    best, best_error = widest.clone(), torch.full_like(widest, float("inf"))
    for shrink in _SHRINK.tolist():
        scale = widest * shrink
        error = torch.round(weight / scale[:, None]).clamp_(low, high).mul_(scale[:, None]).sub_(weight).square_()
        error = error @ importance
        better = error < best_error
        best = torch.where(better, scale, best)
        best_error = torch.where(better, error, best_error)
    return best


def _expand(scale: Tensor, columns: int) -> Tensor:
    if scale.ndim == 1:
        return scale[:, None]
    return scale.repeat_interleave(columns // scale.shape[1], 1)


def _code_range(bits: int) -> tuple[int, int]:
    if bits not in CODE_RANGE:
        raise UsageError(f"integer weights have 4 or 8 bits, got {bits}")
    return CODE_RANGE[bits]


def _require_finite(tensor: Tensor, what: str) -> None:
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise NumericsError(f"{what} {tuple(tensor.shape)} holds {bad} values that are not finite")
