"""The Hopper GEMM compiles for sm_90a without a GPU: to int8 tensor instructions, without a register spilled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from w4a4.kernels.gemm_sm90_variant import Variant
from w4a4.kernels.tuning_sm90 import default_plan, variants

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed", exc_type=ImportError)

_COMPILE = """
import sys
from w4a4.kernels.gemm_sm90_variant import Variant
from w4a4.kernels.gemm_sm90_kernel import compile_kernel
compile_kernel(eval(sys.argv[1]))
"""


def compile_report(variant: Variant, folder: Path) -> tuple[str, str]:
    """What the compiler says and the PTX of a variant. In a process of its own: the DSL reads its environment once."""
    folder.mkdir()
    environment = os.environ | {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
    }
    command = [sys.executable, "-c", _COMPILE, repr(variant)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, next(folder.glob("*.ptx")).read_text()


def check(variant: Variant, folder: Path) -> None:
    report, ptx = compile_report(variant, folder)
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report) == [("0", "0")]
    assert "serialized" not in report and "ignored" not in report  # wgmma one by one; setmaxnreg without effect
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    assert registers * variant.threads <= 65536
    shapes = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k32)\.satfinite\.s32\.s8\.s8", ptx))
    assert shapes == {f"m64n{variant.tokens}k32"}
    products = len(re.findall(r"wgmma\.mma_async", ptx))
    steps = sum(variant.step_blocks(s) * (3 if variant.looks_ahead else 1) for s in range(variant.segments))
    assert products == 4 * steps * variant.blocks_per_warpgroup  # k32 products of 128 columns, all unrolled
    assert ("griddepcontrol.wait" in ptx) == variant.overlap_launch
    assert ("setmaxnreg" in ptx) == variant.moves_registers


@pytest.mark.parametrize("bits", [(4,), (4, 8)])
def test_decode_compiles_to_int8_tensor_instructions(bits: tuple[int, ...], tmp_path: Path) -> None:
    check(default_plan(bits, 1).variant, tmp_path / "ptx")


@pytest.mark.e2e
@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant.name)
def test_everything_that_can_be_chosen_compiles(variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path / "ptx")
