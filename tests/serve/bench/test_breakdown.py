from __future__ import annotations

import pytest

from w4a4.serve.bench.breakdown import OTHER, Breakdown, part_of, sum_up


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("kernel_cutlass_kernel_w4a4kernelskv4_decode_sm90Kv4Decode_object_at__", "attention"),
        ("_attend_split", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("kernel_cutlass_kernel_w4a4kernelskv4_write_sm90Kv4Write_object_at__", "KV write"),
        ("kernel_cutlass_kernel_w4a4kernelsquantize_sm90_kernelQuantize_object_at__", "quantise"),
        ("kernel_cutlass_kernel_w4a4kernelsgemm_sm90_kernelGemm_object_at__", "linears"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "head and float linears"),
        ("void at::native::elementwise_kernel<...>", OTHER),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_times_are_per_step() -> None:
    events = [("gemm_sm90", 10.0)] * 8 + [("kv4_decode", 3.0)] * 2 + [("gemm_sm90_other", 1.0)] * 2
    parts, launches, kernels = sum_up(events, steps=2)
    assert parts == {"linears": 41.0, "attention": 3.0}
    assert launches == {"linears": 5, "attention": 1}
    assert kernels["gemm_sm90"] == (40.0, 4)


def test_the_gap_is_what_the_kernels_leave() -> None:
    part = Breakdown("w4a4", 1, 1024, 50.0, {"linears": 41.0, "attention": 3.0}, {}, {"gemm": (41.0, 4)})
    assert part.gap_us == 6.0
    assert part.to_dict()["gap_us"] == 6.0 and part.to_dict()["kernels"][0]["name"] == "gemm"
