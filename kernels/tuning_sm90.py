"""Which plan a product runs with: a table of measured choices, and a rule for what was not measured."""

from __future__ import annotations

from w4a4.kernels.gemm_sm90_variant import Plan, Variant


def choose(weight_bits: tuple[int, ...], rows: int, columns: int, tokens: int) -> Plan:
    """The plan for tokens x columns activations and rows x columns weights."""
    dual = len(weight_bits) == 2
    for size in (8, 16, 32, 64, 128):
        if tokens <= size:
            stages = {8: 10, 16: 9, 32: 8, 64: 6, 128: 6}[size]
            return Plan(Variant(weight_bits, size, 2, 2, stages, int4_blocks=2 if size < 128 else 1), share="all")
    if dual:
        return Plan(Variant(weight_bits, 192, 2, 2, 4, store_buffers=3), token_group=8, share="none")
    return Plan(Variant(weight_bits, 256, 2, 2, 4, store_buffers=2 if weight_bits == (4,) else 1), token_group=6, share="none")
