"""GPTQ: round the columns of a weight one after the other and let the columns that follow make up for the error.

Frantar et al. 2022 (algorithm 1), with the column order of QUIK (Ashkboos et al. 2023): int4 columns first, then int8,
then the 16-bit outlier columns, which so receive what the integer columns could not express. It minimises
tr((W - Q) H (W - Q)ᵀ), H = E[x xᵀ], greedily. Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.rounding import CODE_RANGE, dequantize
from w4a4.kernels.layout import Segment

_MAX_DAMPING = 10.0


@dataclass(frozen=True)
class GptqResult:
    """A rounded weight.

    codes:   one tensor per segment in stored order: int8 [N, width], or bf16 [N, width] for 16-bit columns
    damping: the share of the mean diagonal that was added to H; above the one asked for if H was too singular
    """

    codes: tuple[Tensor, ...]
    damping: float


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    segments: Sequence[Segment],
    *,
    damping: float = 0.01,
    act_order: bool = True,
    group_size: int = 0,
    block: int = 128,
) -> GptqResult:
    """Round `weight` [N, K] (stored order) under the second moment `hessian` [K, K] of its inputs.

    Args:
        scales: f32 [N, S], one per integer segment, or [N, K / group_size].
        segments: widths and weight bits in stored order; columns are visited by ascending weight bits.
        damping: share of H's mean diagonal added to its diagonal; raised tenfold until H can be factored.
        act_order: within int4 segments visit columns by descending diagonal of H. Codes come back in stored order.
        group_size: columns per scale; 0: one scale per row and segment.
        block: columns between two updates of everything that follows (speed only); at most 128 on a GPU.

    A dead channel (zero diagonal) is rounded to nearest and takes part in no compensation.

    Raises:
        NumericsError: weight, H or scales not finite, or H cannot be factored whatever the damping.
        UsageError: shapes do not fit.
    """
    _check(weight, hessian, scales, segments, group_size)
    rows, columns = weight.shape
    weight, hessian = weight.float(), hessian.float()
    bits, scale_index = _per_column(segments, group_size, weight.device)
    diagonal = hessian.diagonal()
    order = _visiting_order(segments, diagonal, act_order)
    backwards = order.flip(0)
    factor, used_damping = _inverse_factor(hessian[backwards[:, None], backwards], damping)

    round_block = _block_rounder(bits[order], scale_index[order], scales.float().T.contiguous())
    # One row per column of the weight, in visiting order: what the loop reads and writes is contiguous.
    remaining = weight.T[order].contiguous()
    rounded = torch.empty_like(remaining)  # codes, or values of 16-bit columns
    errors = torch.empty(min(block, columns), rows, device=weight.device)

    for start in range(0, columns, block):
        stop = min(start + block, columns)
        made = errors[: stop - start]
        round_block(
            slice(start, stop), remaining[start:stop], rounded[start:stop], made, factor[start:stop, start:stop]
        )
        if stop < columns:
            remaining[stop:].addmm_(factor[start:stop, stop:].T, made, alpha=-1)

    stored = remaining  # no longer read
    stored[order] = rounded
    parts = torch.split(stored.T, [segment.width for segment in segments], 1)
    codes = tuple(
        (part.bfloat16() if segment.weight_bits == 16 else part.to(torch.int8)).contiguous()
        for segment, part in zip(segments, parts, strict=True)
    )
    return GptqResult(codes, used_damping)


def assemble(codes: Sequence[Tensor], scales: Tensor, segments: Sequence[Segment], group_size: int = 0) -> Tensor:
    """The weight float32 [N, K] that codes and scales stand for, in stored order."""
    parts, index, column = [], 0, 0
    for code, segment in zip(codes, segments, strict=True):
        if segment.weight_bits == 16:
            parts.append(code.float())
        elif group_size:
            parts.append(dequantize(code, scales[:, column // group_size : (column + segment.width) // group_size]))
        else:
            parts.append(dequantize(code, scales[:, index]))
            index += 1
        column += segment.width
    return torch.cat(parts, 1)


def _check(weight: Tensor, hessian: Tensor, scales: Tensor, segments: Sequence[Segment], group_size: int) -> None:
    rows, columns = weight.shape
    if hessian.shape != (columns, columns):
        raise UsageError(
            f"the Hessian of a weight {(rows, columns)} is {(columns, columns)}, got {tuple(hessian.shape)}"
        )
    if sum(segment.width for segment in segments) != columns:
        raise UsageError(f"segments of widths {[s.width for s in segments]} do not add up to {columns} columns")
    if group_size and any(s.weight_bits == 16 or s.width % group_size for s in segments):
        raise UsageError(f"groups of {group_size} columns do not fit segments of widths {[s.width for s in segments]}")
    expected = columns // group_size if group_size else sum(s.weight_bits < 16 for s in segments)
    if scales.shape != (rows, expected):
        raise UsageError(f"scales must be {(rows, expected)}, got {tuple(scales.shape)}")
    if not (torch.isfinite(scales).all() and (scales > 0).all()):
        raise NumericsError("weight scales must be finite and above zero")
    for name, tensor in (("weight", weight), ("Hessian", hessian)):
        if not torch.isfinite(tensor).all():
            raise NumericsError(f"{name} {tuple(tensor.shape)} is not finite: GPTQ cannot run on it")


class _RoundBlock(Protocol):
    def __call__(self, columns: slice, remaining: Tensor, rounded: Tensor, errors: Tensor, factor: Tensor) -> None:
        """Round columns [C, N] of `remaining` one after the other; write codes and errors over `factor`'s diagonal."""


def _block_rounder(bits: Tensor, scale_index: Tensor, scales: Tensor) -> _RoundBlock:
    """Bits and scale of every column in visiting order [K], scales [S, N]."""
    if scales.is_cuda:
        return _gpu_rounder(bits, scale_index, scales)
    column_bits, column_scale = bits.tolist(), scale_index.tolist()

    def round_block(columns: slice, remaining: Tensor, rounded: Tensor, errors: Tensor, factor: Tensor) -> None:
        for done, column in enumerate(range(columns.start, columns.stop)):
            current = remaining[done]
            if done:
                current = current - factor[:done, done] @ errors[:done]
            if column_bits[column] == 16:
                rounded[done] = value = current.bfloat16().float()
            else:
                index = column_scale[column]
                low, high = CODE_RANGE[column_bits[column]]
                rounded[done] = code = torch.round(current / scales[index]).clamp_(low, high)
                value = code * scales[index]
            errors[done] = (current - value) / factor[done, done]

    return round_block


def _gpu_rounder(bits: Tensor, scale_index: Tensor, scales: Tensor) -> _RoundBlock:
    from w4a4.export.gptq_columns import round_columns

    low, high = torch.zeros_like(bits, dtype=torch.float32), torch.zeros_like(bits, dtype=torch.float32)
    for width, (lowest, highest) in CODE_RANGE.items():
        low.masked_fill_(bits == width, lowest)
        high.masked_fill_(bits == width, highest)
    index = scale_index.int()

    def round_block(columns: slice, remaining: Tensor, rounded: Tensor, errors: Tensor, factor: Tensor) -> None:
        grid = (index[columns], low[columns], high[columns])
        round_columns(remaining, rounded, errors, factor, scales, grid)

    return round_block


def _per_column(segments: Sequence[Segment], group_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight bits and index of the scale of every column in stored order, int64 [K] each."""
    bits, indices, index = [], [], 0
    for segment in segments:
        bits += [segment.weight_bits] * segment.width
        indices += [index] * segment.width
        index += segment.weight_bits < 16
    if group_size:
        indices = [column // group_size for column in range(len(bits))]
    return torch.tensor(bits, device=device), torch.tensor(indices, device=device)


def _visiting_order(segments: Sequence[Segment], diagonal: Tensor, act_order: bool) -> Tensor:
    starts = [0]
    for segment in segments:
        starts.append(starts[-1] + segment.width)
    order = []
    for index in sorted(range(len(segments)), key=lambda i: segments[i].weight_bits):
        columns = torch.arange(starts[index], starts[index + 1], device=diagonal.device)
        if act_order and segments[index].weight_bits == 4:
            columns = columns[torch.argsort(diagonal[columns], descending=True, stable=True)]
        order.append(columns)
    return torch.cat(order)


def _inverse_factor(reversed_hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """Upper triangular U with UᵀU = c (H + damping mean(diag H) I)⁻¹ for some c > 0, and the damping that was needed.

    `reversed_hessian` is J H J, J the reversal of rows; it is overwritten. J H J = L Lᵀ gives U = J L⁻¹ J: one
    factorisation, no explicit inverse. Float32 first, float64 if that fails, then ten times the damping. The factor c
    cancels in the feedback, which uses U[i, j] / U[i, i].
    """
    hessian, diagonal = reversed_hessian, reversed_hessian.diagonal().clone()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if bool((~dead).any()) else diagonal.new_ones(())
    hessian.div_(mean)
    hessian[dead] = 0
    hessian[:, dead] = 0
    diagonal = torch.where(dead, 1.0, diagonal / mean)
    attempt = damping
    while attempt <= _MAX_DAMPING:
        hessian.diagonal().copy_(diagonal + attempt)
        for dtype in (torch.float32, torch.float64):
            lower, failed = torch.linalg.cholesky_ex(hessian.to(dtype))
            if int(failed):
                continue
            inverse = torch.eye(len(hessian), device=hessian.device, dtype=dtype).mT  # LAPACK's order: no copies
            torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
            del lower
            if torch.isfinite(inverse).all():
                return inverse.flip(0, 1).float(), attempt
        attempt = attempt * 10 if attempt > 0 else 1e-4
    raise NumericsError(
        f"the Hessian [{len(hessian)}, {len(hessian)}] cannot be factored, not even with damping {_MAX_DAMPING:g}",
        "use more calibration tokens, or a recipe that rounds to nearest",
    )
