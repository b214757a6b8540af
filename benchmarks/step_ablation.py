"""What a decode step would save without each of its kernels, everything else as it was. A part of bench_h200.py.

A kernel's time from the profiler holds what it waits for; by how much the step is shorter without it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from w4a4.kernels import kv4, ops
from w4a4.kernels.reference import QuantizedActivation
from w4a4.serve import attention
from w4a4.serve.bench.fixed_batch import FixedBatch
from w4a4.serve.bench.timing import measure
from w4a4.serve.model import CausalLM

STEPS = 16
KERNELS = ("qkv", "KV write", "attention", "quantise o", "o", "rmsnorm", "gate_up", "swiglu", "down")
GROUPS = {
    "all quantise": ("quantise o", "rmsnorm", "swiglu"),
    "all attention": ("KV write", "attention"),
}


class Without:
    """`kernels.ops` in which some kernels are not launched: what they would return is memory of the right shape."""

    def __init__(self, model: CausalLM, left_out: tuple[str, ...]) -> None:
        self._left_out = left_out
        layers = model.layers
        self._names = {id(getattr(layer, name)): name for layer in layers for name in ("qkv", "o", "gate_up", "down")}
        self._held: dict[Any, Tensor] = {}

    def fuse_linears(self, *arguments: Any) -> Any:
        raise AssertionError("the model is there already")

    def quantize_activation(self, x: Tensor, linear: Any) -> Any:
        return self._activation(x, linear) if "quantise o" in self._left_out else ops.quantize_activation(x, linear)

    def rmsnorm_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, linear: Any
    ) -> tuple[Tensor, Any]:
        if "rmsnorm" in self._left_out:
            return x, self._activation(x, linear)
        return ops.rmsnorm_quantize(x, residual, weight, eps, linear)

    def silu_mul_quantize(self, gate_up: Tensor, linear: Any) -> Any:
        return (
            self._activation(gate_up, linear) if "swiglu" in self._left_out else ops.silu_mul_quantize(gate_up, linear)
        )

    def linear_forward(self, activation: Any, linear: Any) -> Tensor:
        if self._names[id(linear)] in self._left_out:
            return self.held("y", activation.codes.shape[0], linear.layout.out_features, torch.bfloat16)
        return ops.linear_forward(activation, linear)

    def _activation(self, x: Tensor, linear: Any) -> QuantizedActivation:
        segments = len(linear.layout.segments)
        codes = self.held("codes", x.shape[0], linear.code_columns, torch.int8)
        return QuantizedActivation(codes, self.held("scales", x.shape[0], segments, torch.float32), None, None)

    def held(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        key = (name, rows, columns, dtype)
        if key not in self._held:
            self._held[key] = torch.randint(1, 7, (rows, columns), device="cuda").to(dtype)
        return self._held[key]


def step_us(model: CausalLM, batch: int, context: int, left_out: tuple[str, ...]) -> float:
    """Microseconds of a step without the kernels `left_out`."""
    without = Without(model, left_out)

    def write(qkv: Tensor, *arguments: Any) -> Tensor:
        heads = model.config.num_heads
        return without.held("q", qkv.shape[0], heads * qkv.shape[2], qkv.dtype).view(-1, heads, qkv.shape[2])

    replaced: dict[str, Callable[..., Tensor]] = {}
    if "KV write" in left_out:
        replaced["kv_rope_write"] = write
    if "attention" in left_out:
        replaced["kv_attention"] = lambda q, *arguments: q
    model.ops = without
    try:
        for name, function in replaced.items():
            setattr(attention, name, function)
        run = FixedBatch(model, batch, context + 2 * STEPS)

        def seek() -> None:
            run.seek(context)

        return 1e6 * measure(lambda: run.decode(STEPS), model.device, 3, setup=seek).median / STEPS
    finally:
        model.ops = ops
        attention.kv_rope_write, attention.kv_attention = kv4.kv_rope_write, kv4.kv_attention  # type: ignore[attr-defined]


def ablation(model: CausalLM, batch: int, context: int) -> dict[str, Any]:
    """An entry of `ablation` in bench-h200.json."""
    whole = step_us(model, batch, context, ())
    sets = {name: (name,) for name in KERNELS} | GROUPS
    saved = {name: round(whole - step_us(model, batch, context, left_out), 1) for name, left_out in sets.items()}
    found = {
        "batch": batch,
        "step_us": round(whole, 1),
        "saved_us": saved,
        "without_layers_us": round(step_us(model, batch, context, KERNELS), 1),
    }
    print(found, flush=True)
    return found
