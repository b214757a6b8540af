"""Quantising activations on Hopper: what a caller sees, and which compiled variant runs.

    codes, scales = quantize(x, layout, perm)                                    # attention output
    hidden, codes, scales = rmsnorm_quantize(x, residual, weight, eps, layout, perm)
    codes, scales = silu_mul_quantize(gate_up, layout, perm)

One launch each, bf16 in, what `gemm_sm90.gemm` takes out: the reference's codes and scales as `lanes` there puts them.
Between reading bf16 and writing codes everything is float32 (the reference on float32 inputs); only the residual sum
is rounded, because it is stored. The kernel itself is in `quantize_sm90_kernel`; compiled objects come from
`compile_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels.compile_cache import Kernel, load
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.quantize_sm90_variant import (
    FEW_ROWS,
    QuantizeVariant,
    Source,
    for_few_rows,
    unsupported,
    variant_of,
)

ARCH = "sm_90a"
_MAX_ELEMENTS = 2**31 - 1  # of one tensor: the kernel's addresses are 32-bit


def quantize(x: Tensor, layout: LinearLayout, perm: Tensor | None) -> tuple[Tensor, Tensor]:
    """x bf16 [T, K], contiguous, to codes int8 [T, K] and scales f32 [T, segments]."""
    _, codes, scales = _run("plain", x, None, None, perm, 0.0, layout)
    return codes, scales


def rmsnorm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, layout: LinearLayout, perm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden = x + residual in bf16 (x itself without a residual), and the `quantize` of its RMSNorm."""
    source: Source = "rmsnorm" if residual is None else "rmsnorm_residual"
    return _run(source, x, residual, weight, perm, eps, layout)


def silu_mul_quantize(gate_up: Tensor, layout: LinearLayout, perm: Tensor | None) -> tuple[Tensor, Tensor]:
    """The `quantize` of silu(gate) * up, gate_up bf16 [T, 2 K] = [gate | up]."""
    _, codes, scales = _run("silu", gate_up, None, None, perm, 0.0, layout)
    return codes, scales


def _run(
    source: Source,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    perm: Tensor | None,
    eps: float,
    layout: LinearLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    reason = unsupported(layout)
    if reason:
        raise ValueError(f"the sm_90 quantise kernels do not run {reason}")
    tokens, width = x.shape
    channels = layout.in_features
    expected = 2 * channels if source == "silu" else channels
    if width != expected or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"activation must be contiguous bfloat16 [T, {expected}], got {x.dtype} {tuple(x.shape)}")
    codes = torch.empty(tokens, channels, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, len(layout.segments), dtype=torch.float32, device=x.device)
    hidden = x if residual is None else torch.empty_like(x)
    if tokens:
        variant = variant_of(source, layout, perm is not None, weight is not None)
        if tokens <= FEW_ROWS:
            variant = for_few_rows(variant)
        rows = _MAX_ELEMENTS // width
        for start in range(0, tokens, rows):
            part = slice(start, start + rows) if tokens > rows else slice(None)
            launch(
                variant,
                x[part],
                None if residual is None else residual[part],
                weight,
                perm,
                None if residual is None else hidden[part],
                codes[part],
                scales[part],
                eps,
                layout,
            )
    return hidden, codes, scales


def launch(
    variant: QuantizeVariant,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    perm: Tensor | None,
    hidden: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    eps: float,
    layout: LinearLayout,
) -> None:
    """One launch on the current stream with operands that were checked; may be captured in a CUDA graph."""
    blocks, owners = share_out(variant, x.shape[0], _multiprocessors(x.device.index))
    _kernel(variant)(
        x,
        residual,
        weight,
        perm,
        hidden,
        codes.view(torch.int32),
        scales,
        layout.segments[0].width,
        *layout.clip,
        eps,
        blocks,
        owners,
    )


def share_out(variant: QuantizeVariant, rows: int, multiprocessors: int) -> tuple[int, int]:
    """Thread blocks of a launch, and how many owners of rows they are: each gets the same number, or one less."""
    resident = variant.blocks_per_multiprocessor * multiprocessors // variant.cluster
    rounds = -(-rows // (resident * variant.groups))
    owners = -(-rows // rounds)
    return variant.cluster * min(owners, resident), owners


def kernel_of(variant: QuantizeVariant) -> Kernel:
    """A variant as something the compile cache can compile."""

    def build() -> Any:
        from w4a4.kernels.quantize_sm90_kernel import build as compile_kernel

        return compile_kernel(variant)

    here = Path(__file__).parent
    sources = ("quantize_sm90_variant.py", "quantize_sm90_kernel.py", "ptx_sm90.py")
    return Kernel(variant.name, tuple(here / source for source in sources), build)


@cache
def _kernel(variant: QuantizeVariant) -> Callable[..., Any]:
    return load(kernel_of(variant), ARCH)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
