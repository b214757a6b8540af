"""The kernels that quantise and write the cache compile without a GPU for every use, and none spills a register."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from w4a4.configs.shapes import shape_of
from w4a4.kernels.compile_cache import Kernel, compile_to
from w4a4.kernels.kernel_set_sm90 import LinearUse, kernels_of
from w4a4.kernels.kv4 import KVPageLayout
from w4a4.kernels.kv4_sm90 import kernels_of as cache_kernels_of
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.quantize_sm90_variant import Source

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed", exc_type=ImportError)

NORMED: tuple[Source, ...] = ("rmsnorm", "rmsnorm_residual")
GROUPS: dict[str, tuple[tuple[Source, ...], int]] = {  # what makes the input, and the block of its Hadamard
    "qkv": (NORMED, 1),
    "o": (("plain",), 1),
    "gate_up": (NORMED, 1),
    "down": (("silu",), 128),
}


def segments_of(recipe: str, k: int) -> tuple[Segment, ...]:
    first, last = k - k // 8 // 128 * 128, k // 8 // 128 * 128
    return {
        "w4a4": (Segment(k, 4, 4),),
        "dual": (Segment(first, 4, 4), Segment(last, 8, 8)),
        "fmpq": (Segment(first, 4, 4), Segment(last, 8, 4)),
        "w8a8": (Segment(k, 8, 8),),
    }[recipe]


def uses(alias: str, recipe: str) -> list[LinearUse]:
    """The linears of a layer as the model runs them, with and without a permutation and gains, at both `--act`."""
    config = shape_of(alias)
    assert config is not None
    shapes = config.linear_shapes()
    rows = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    found = []
    for group, parts in rows.items():
        sources, hadamard = GROUPS[group]
        named = [shape for name, shape in shapes.items() if name.split(".")[1].removesuffix("_proj") in parts]
        k = named[0][1]
        layout = LinearLayout(
            sum(n for n, _ in named), segments_of(recipe, k), (0.95, 3.5), hadamard=hadamard if recipe == "dual" else 1
        )
        for act in ("map", "a8"):
            for special in (False, True):
                found.append(LinearUse(layout.at(act), sources, special, special))
    return found


def all_kernels() -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    for alias in ("llama3-8b", "llama3-70b"):
        for recipe in ("w4a4", "dual", "fmpq", "w8a8"):
            kernels |= kernels_of(uses(alias, recipe))
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 128), (9, 3, 64), (14, 2, 64), (16, 8, 256)):
        for bits, sinks in ((4, 0), (4, 4), (16, 0)):
            normed = ((True, True, True),) if dim == 128 else ()  # Qwen3
            for flags in ((False, False, False), (False, True, True), *normed):
                layout = KVPageLayout(kv_heads, dim, 16, bits, sinks)
                kernels |= cache_kernels_of(layout, heads, torch.bfloat16, *flags)
    others = ("gemm", "kv4-decode")  # the GEMM's have their own test; decode attention spills some words for occupancy
    return {name: kernel for name, kernel in kernels.items() if not name.startswith(others)}


@pytest.mark.e2e
@pytest.mark.parametrize("kernel", all_kernels().values(), ids=lambda kernel: kernel.name)
def test_nothing_spills(kernel: Kernel, tmp_path: Path) -> None:
    assert frame_bytes(compile_to(kernel, "sm_90a", tmp_path)) == 0


def frame_bytes(object_file: Path) -> int:
    """Bytes of stack of a thread, where registers spill to: EIATTR_FRAME_SIZE, 0x11, of the cubin's .nv.info."""
    pieces = object_file.read_bytes().split(bytes([4, 0x11, 8, 0]))[1:]  # sized value, attribute, symbol index, value
    return max(int.from_bytes(piece[4:8], "little") for piece in pieces)
