"""Which plan a product runs with: a table of measured choices, and a rule for what was not measured."""

from __future__ import annotations

from w4a4.kernels.gemm_sm90_variant import Plan, Variant


def choose(weight_bits: tuple[int, ...], rows: int, columns: int, tokens: int) -> Plan:
    """The plan for tokens x columns activations and rows x columns weights."""
    for size, stages in ((8, 5), (16, 5), (32, 8), (64, 6)):
        if tokens <= size:
            variant = Variant(
                weight_bits, size, 2, 2, stages, int4_blocks=2, weights_once=True, looks_ahead=size > 16,
                shares_tiles=True, l2_steps=8,
            )  # fmt: skip
            return Plan(variant, share="all")
    if tokens <= 256:
        return Plan(Variant(weight_bits, 128, 2, 2, 5, looks_ahead=True, shares_tiles=True), 2, "all")
    if len(weight_bits) == 2:
        return Plan(Variant(weight_bits, 256, 2, 2, 4, packs_first=True), 2)
    return Plan(Variant(weight_bits, 256, 2, 2, 4, store_buffers=2 if weight_bits == (4,) else 1), 2)
