from __future__ import annotations

import pytest

from w4a4.configs.shapes import shape_of
from w4a4.serve.bench.roofline import LIMITS, Limits, limits_of, step_cost

LIMIT = Limits(bandwidth=1e12, int8=1000e12, fp8=1000e12, bf16=500e12)


def test_decode_reads_weights_and_every_context() -> None:
    config = shape_of("llama3-8b")
    assert config is not None
    cost = step_cost(config, 4_000_000_000, 1_000_000_000, kv_token_bytes=100.0, batch=3, new_tokens=1, context=50)
    assert cost.weight_bytes == 5_000_000_000
    assert cost.kv_bytes == 3 * 50 * 100 + 3 * 100
    # 6.98 G multiplications per token in the linears, and the queries against 50 keys and values of 32 heads
    assert cost.linear_ops == 2 * 3 * 6_979_321_856
    assert cost.float_ops == 2 * (2 * 3 * 50 * 32 * 128 * 32 + 3 * 128256 * 4096)
    assert cost.seconds(LIMIT, "int8-wgmma sm_90") == pytest.approx((5e9 + cost.kv_bytes) / 1e12)


def test_prefill_is_bound_by_arithmetic_and_reads_only_what_was_cached_before() -> None:
    config = shape_of("llama3-8b")
    assert config is not None
    cost = step_cost(config, 4_000_000_000, 0, kv_token_bytes=100.0, batch=2, new_tokens=1000, context=1000)
    assert cost.kv_bytes == 2000 * 100
    pairs = 2 * (1000 * 1001 / 2)
    assert cost.float_ops == 2 * (2 * pairs * 32 * 128 * 32 + 2 * 128256 * 4096)
    expected = cost.linear_ops / 1000e12 + cost.float_ops / 500e12
    assert cost.seconds(LIMIT, "int8-wgmma sm_90") == pytest.approx(expected)
    assert cost.seconds(LIMIT, "bf16-cublas") == pytest.approx((cost.linear_ops + cost.float_ops) / 500e12)


def test_limits_are_those_of_the_device_and_of_the_path() -> None:
    assert limits_of("NVIDIA H200") is LIMITS["H200"]
    assert limits_of("NVIDIA GeForce RTX 4090") is None
    assert LIMITS["H200"].rate("fp8-scaled_mm") == LIMITS["H200"].fp8
    assert LIMITS["H200"].rate("bf16-cublas sm_90 (w4a16)") == LIMITS["H200"].bf16
    assert LIMITS["H200"].rate("int8-wgmma sm_90 (w4a8)") == LIMITS["H200"].int8
