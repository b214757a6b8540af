"""The least time a step could take: bytes it must move over bandwidth, operations it must do over arithmetic rates.

Counted for the whole step: weights once, the head, K and V of every context read and the new ones written, and per
matrix product its operations at the rate of what multiplies. Activations between kernels are left out (in decode they
fit in L2), so the limit is optimistic and the fraction honest.
"""

from __future__ import annotations

from dataclasses import dataclass

from w4a4.configs.architecture import ModelConfig


@dataclass(frozen=True)
class Limits:
    """What a GPU can do: bytes/s (device copy, read and written; measured) and dense peaks in operations/s."""

    bandwidth: float
    int8: float
    fp8: float
    bf16: float

    def rate(self, path: str) -> float:
        """Operations per second of the arithmetic that a linear's path names."""
        if path.startswith("fp8"):
            return self.fp8
        return self.bf16 if path.startswith("bf16") else self.int8


LIMITS = {"H200": Limits(4.27e12, 1979e12, 1979e12, 989.5e12)}
"""By a part of the device's name. Bandwidth of the H200: measured, device to device; peaks: data sheet."""


def limits_of(device_name: str) -> Limits | None:
    return next((limits for name, limits in LIMITS.items() if name in device_name), None)


@dataclass(frozen=True)
class StepCost:
    """What one step must move and compute.

    weight_bytes: linears and head as they are stored on the device; kv_bytes: K and V read and written.
    linear_ops: of the quantised linears; float_ops: of head and attention, in 16 bit.
    """

    weight_bytes: float
    kv_bytes: float
    linear_ops: float
    float_ops: float

    def seconds(self, limits: Limits, path: str) -> float:
        """The greater of the time to move the bytes and the time to do the operations."""
        arithmetic = self.linear_ops / limits.rate(path) + self.float_ops / limits.bf16
        return max((self.weight_bytes + self.kv_bytes) / limits.bandwidth, arithmetic)


def step_cost(
    config: ModelConfig,
    linear_bytes: int,
    head_bytes: int,
    kv_token_bytes: float,
    batch: int,
    new_tokens: int,
    context: float,
) -> StepCost:
    """A step in which each of `batch` sequences computes `new_tokens` tokens that end at `context` tokens.

    kv_token_bytes: K and V of one token in all layers, as stored. In prefill (new_tokens > 1) a chunk reads what was
    cached before it; its own keys and values do not come back from memory.
    """
    tokens = batch * new_tokens
    before = context - new_tokens
    read = batch * (context if new_tokens == 1 else before)
    linear_macs = sum(rows * columns for rows, columns in config.linear_shapes().values()) * config.num_layers
    pairs = batch * (new_tokens * before + new_tokens * (new_tokens + 1) / 2)  # queries with the keys they see
    attention_macs = 2 * pairs * config.num_heads * config.head_dim * config.num_layers
    head_macs = batch * config.vocab_size * config.hidden_size  # the last token of each sequence
    return StepCost(
        weight_bytes=linear_bytes + head_bytes,
        kv_bytes=(read + tokens) * kv_token_bytes,
        linear_ops=2.0 * linear_macs * tokens,
        float_ops=2.0 * (attention_macs + head_macs),
    )
