"""The W4Ax GEMM on Hopper: what a caller sees, and which compiled variant runs.

    linear = prepack(layout, weights, weight_scales, bias, device)      # once, at load (`prepack_sm90`)
    y = gemm(codes, scales, linear)                                     # bf16 [T, N]

The kernel itself is in `gemm_sm90_kernel`, its operand order in `prepack_sm90`, the choice of tile per shape in
`tuning_sm90`; compiled objects come from `compile_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels.compile_cache import Kernel, load
from w4a4.kernels.gemm_sm90_variant import Plan, Variant
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.prepack_sm90 import PrepackedLinear
from w4a4.kernels.tuning_sm90 import choose

ARCH = "sm_90a"


def gemm(codes: Tensor, scales: Tensor, linear: PrepackedLinear, out: Tensor | None = None) -> Tensor:
    """y[t, n] = sum over segments of scales[t, s] * weight_scale[n, s] * (codes . weights)[t, n] + bias[n], in bf16.

    Sums are exact int32 over a whole segment; the epilogue is float32. Bit-identical in every run.

    Args:
        codes: int8 [T, K], contiguous, 16-byte aligned, K = the linear's in_features (a multiple of 16): the segments
            side by side in stored order, without padding, as `lanes` puts them. T >= 0.
        scales: f32 [T, segments], contiguous; with `lanes`.
        linear: from `prepack`, on the same device.
        out: bf16 [T, N] to write to, contiguous, 16-byte aligned, N a multiple of 8; allocated if None.
    Returns: bf16 [T, N]. Where N is not a multiple of 8 it is a view of a wider tensor.
    Raises:
        ValueError: operands that do not fit together.

    Launches one kernel on the current stream and allocates nothing after the first call but `out`; may be captured in a
    CUDA graph (call once before). The workspace is one per device: two products must not run at the same time.
    """
    layout = linear.layout
    if codes.shape[1:] != (layout.in_features,) or codes.dtype != torch.int8 or not codes.is_contiguous():
        raise ValueError(
            f"codes must be contiguous int8 [T, {layout.in_features}], got {codes.dtype} {tuple(codes.shape)}"
        )
    if layout.in_features % 16:
        raise ValueError(f"in_features must be a multiple of 16, got {layout.in_features}")
    tokens, segments = codes.shape[0], len(layout.segments)
    if scales.shape != (tokens, segments) or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(
            f"scales must be contiguous float32 [{tokens}, {segments}], got {scales.dtype} {tuple(scales.shape)}"
        )
    if not codes.is_cuda or codes.device != linear.words.device or codes.device != scales.device:
        raise ValueError(
            f"codes, scales and weights must be on one CUDA device, got {codes.device}, {scales.device} and "
            f"{linear.words.device}"
        )
    width = -(-layout.out_features // 8) * 8
    if out is None:
        out = torch.empty(tokens, width, dtype=torch.bfloat16, device=codes.device)
    elif out.shape != (tokens, width) or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous bfloat16 [{tokens}, {width}], got {out.dtype} {tuple(out.shape)}")
    if tokens:
        run(codes, scales, linear, out, choose(linear.weight_bits, layout.out_features, layout.in_features, tokens))
    return out if width == layout.out_features else out[:, : layout.out_features]


def lanes(codes: Tensor, scales: Tensor, layout: LinearLayout) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, K] and scales f32 [T, segments] as the GEMM takes them; the quantise kernels write them so.

    4-bit codes stand in the high half of their byte, 16 times their value, and the scale is a sixteenth: the same
    products, exactly, but the low half never toggles in the multipliers, and power is what bounds a large product.
    """
    parts, moved_scales, start = [], [], 0
    for index, segment in enumerate(layout.segments):
        factor = 16 if segment.act_bits == 4 else 1
        parts.append(codes[:, start : start + segment.width] * factor)
        moved_scales.append(scales[:, index] / factor)
        start += segment.width
    return torch.cat(parts, 1), torch.stack(moved_scales, 1)


def run(codes: Tensor, scales: Tensor, linear: PrepackedLinear, out: Tensor, plan: Plan) -> None:
    """`gemm` with a given plan and operands that were checked."""
    device = codes.device.index
    launch = schedule(linear.blocks, linear.words.shape[0], codes.shape[0], plan, _multiprocessors(device))
    segments = linear.layout.segments
    _kernel(plan.variant)(
        codes,
        scales.view(-1),
        linear.words,
        linear.rows.view(-1),
        out,
        _workspace(device, launch.workspace_words, plan.variant.packs_first),
        launch.clusters,
        launch.whole_tiles,
        min(plan.token_group, launch.token_tiles),
        segments[0].width if len(segments) == 2 else 0,
        launch.steps[0],
        launch.steps[1] if len(segments) == 2 else 0,
        sum(4 for bits in (segments[0].weight_bits, segments[0].act_bits) if bits == 4),
    )


@dataclass(frozen=True)
class Launch:
    """The sizes of one launch."""

    clusters: int
    token_tiles: int
    whole_tiles: int
    steps: tuple[int, ...]  # of each segment
    workspace_words: int


@lru_cache(maxsize=65536)
def schedule(blocks: tuple[int, ...], row_blocks: int, tokens: int, plan: Plan, multiprocessors: int) -> Launch:
    """Cut a product into tiles and share them out; see the module docstring of `gemm_sm90_kernel`.

    `blocks` are the 128-column blocks of each segment, `row_blocks` the blocks of 64 rows.
    """
    variant = plan.variant
    token_tiles = -(-tokens // variant.tokens)
    tiles = token_tiles * -(-row_blocks // (variant.row_blocks * variant.cluster))
    steps = tuple(-(-count // variant.step_blocks(i)) for i, count in enumerate(blocks))
    clusters = multiprocessors // variant.cluster
    if plan.share == "none":
        whole = tiles
        clusters = min(clusters, tiles)
    elif plan.share == "rest":
        whole = tiles // clusters * clusters
        if whole == 0:
            clusters = min(clusters, tiles * sum(steps))
    else:
        whole = 0
        clusters = min(clusters, tiles * sum(steps))
    shared = tiles - whole
    if shared and not variant.shares_tiles:
        raise ValueError(f"{variant.name} was not made to share tiles")
    return Launch(
        clusters=clusters,
        token_tiles=token_tiles,
        whole_tiles=whole,
        steps=steps,
        workspace_words=clusters * variant.cluster * variant.warpgroups * variant.slot_words * 128
        if shared or variant.packs_first
        else 0,
    )


def kernel_of(variant: Variant) -> Kernel:
    """A variant as something the compile cache can compile."""

    def build() -> Any:
        from w4a4.kernels.gemm_sm90_kernel import compile_kernel

        return compile_kernel(variant)

    here = Path(__file__).parent
    return Kernel(variant.name, (here / "gemm_sm90_variant.py", here / "gemm_sm90_kernel.py"), build)


@cache
def _kernel(variant: Variant) -> Callable[..., Any]:
    return load(kernel_of(variant), ARCH)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_workspaces: dict[tuple[int, bool], list[Tensor]] = {}


def _workspace(device: int, words: int, is_scratch: bool) -> Tensor:
    """Where clusters hand over sums: all words are `NOTHING` between launches, the kernel resets what it read.

    `is_scratch`: another one, for words that mean nothing between launches. Outgrown workspaces are kept: a captured
    CUDA graph may still use them.
    """
    held = _workspaces.setdefault((device, is_scratch), [])
    if not held or held[-1].numel() < words:
        held.append(torch.full((max(words, 4),), -(2**31), dtype=torch.int32, device=f"cuda:{device}"))
    return held[-1]
