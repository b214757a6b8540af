"""`w4a4 bench kernels`: every operation of a decoder layer alone, by number of tokens, beside its 16-bit counterpart.

Weights rotate through enough copies that none is found in L2 (cold, as in a model whose layers follow each other), and
on a GPU the copies are launched from one CUDA graph. Random data; median of the repetitions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.shapes import shape_of
from w4a4.kernels import ops
from w4a4.kernels.layout import ActMode
from w4a4.serve.baselines import dense_weight
from w4a4.serve.bench.roofline import limits_of
from w4a4.serve.bench.timing import measure
from w4a4.serve.random_weights import RandomModel

COLUMNS = ["model", "op", "shape", "tokens", "us", "16-bit us", "speed-up", "GB/s", "Tops/s", "of limit", "path"]
GPU_MODELS, CPU_MODELS = ("llama3-8b", "llama3-70b"), ("smollm2-135m",)
GPU_TOKENS, CPU_TOKENS = (1, 16, 64, 256, 1024, 4096), (1, 16, 64)
COLD_BYTES = 300e6
"""Weights that a rotation must exceed: five times the L2 of an H200."""
MAX_COPIES = 16


@dataclass(frozen=True)
class KernelShape:
    model: str
    config: ModelConfig
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class KernelRecord:
    """One operation. bytes: what it must move; operations: 0 for element-wise ones; base_us: 16 bit, or None."""

    model: str
    op: str
    shape: str
    tokens: int
    microseconds: float
    base_us: float | None
    bytes: float
    operations: float
    path: str
    limit: float | None

    def to_dict(self) -> dict[str, Any]:
        values = {
            "model": self.model, "op": self.op, "shape": self.shape, "m": self.tokens,
            "us": round(self.microseconds, 2), "bytes": self.bytes, "operations": self.operations, "path": self.path,
        }  # fmt: skip
        if self.base_us is not None:
            values["bf16_us"] = round(self.base_us, 2)
        if self.limit is not None:
            values["of_limit"] = round(self.limit, 3)
        return values

    def row(self) -> list[object]:
        return [
            self.model,
            self.op,
            self.shape,
            self.tokens,
            f"{self.microseconds:.1f}",
            "-" if self.base_us is None else f"{self.base_us:.1f}",
            "-" if self.base_us is None else f"{self.base_us / self.microseconds:.2f}x",
            f"{self.bytes / self.microseconds / 1e3:.0f}",
            f"{self.operations / self.microseconds / 1e6:.1f}" if self.operations else "-",
            "-" if self.limit is None else f"{100 * self.limit:.0f} %",
            self.path,
        ]


def shapes_for(device: torch.device) -> list[KernelShape]:
    is_gpu = device.type == "cuda"
    found = []
    for name in GPU_MODELS if is_gpu else CPU_MODELS:
        config = shape_of(name)
        assert config is not None
        found.append(KernelShape(name, config, GPU_TOKENS if is_gpu else CPU_TOKENS))
    return found


FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def measure_kernels(
    shapes: Sequence[KernelShape], device: torch.device, act: ActMode, repetitions: int
) -> Iterator[KernelRecord]:
    """Records of every shape in turn: the four linears of a layer, then the three ways to quantise."""
    for shape in shapes:
        for name in FUSED:
            yield from _linear_records(shape, name, device, act, repetitions)
        yield from _quantize_records(shape, device, act, repetitions)


def _linear_records(
    shape: KernelShape, name: str, device: torch.device, act: ActMode, repetitions: int
) -> Iterator[KernelRecord]:
    config = shape.config
    rows = sum(config.linear_shapes()[part][0] for part in FUSED[name])
    columns = config.linear_shapes()[FUSED[name][0]][1]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    copies = _copies(rows * columns * 0.56)
    linears, dense = [], []
    for copy in range(copies):
        packed = RandomModel(config, device, seed=copy)
        parts = [packed.linear(f"model.layers.0.{part}") for part in FUSED[name]]
        linears.append(ops.fuse_linears(parts, device, act))
        if copy < _copies(rows * columns * 2.0):
            dense.append(torch.cat([dense_weight(part, device).to(dtype) for part in parts]))
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in linears[0].weights)
    for tokens in shape.tokens:
        x = torch.randn(tokens, columns, dtype=dtype, device=device)
        quantized = ops.quantize_activation(x, linears[0])
        ours = _rotated([partial(ops.linear_forward, quantized, linear) for linear in linears], device, repetitions)
        base = _rotated([partial(F.linear, x, weight) for weight in dense], device, repetitions)
        yield _record(
            shape.model, name, f"{rows} x {columns}", tokens, ours, base,
            weight_bytes + tokens * (columns + 2.0 * rows), 2.0 * tokens * rows * columns, linears[0].path, device,
        )  # fmt: skip


def _quantize_records(
    shape: KernelShape, device: torch.device, act: ActMode, repetitions: int
) -> Iterator[KernelRecord]:
    config = shape.config
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    size = 4.0 if device.type == "cpu" else 2.0
    packed = RandomModel(config, device)

    def fused(name: str) -> ops.RuntimeLinear:
        return ops.fuse_linears([packed.linear(f"model.layers.0.{part}") for part in FUSED[name]], device, act)

    qkv, o, down = fused("qkv"), fused("o"), fused("down")
    for tokens in shape.tokens:
        hidden, inner = config.hidden_size, config.intermediate_size
        x, residual = (torch.randn(tokens, hidden, dtype=dtype, device=device) for _ in range(2))
        attended = torch.randn(tokens, config.q_size, dtype=dtype, device=device)
        gate_up = torch.randn(tokens, 2 * inner, dtype=dtype, device=device)
        works: tuple[tuple[str, int, Callable[[], object], float], ...] = (
            ("rmsnorm + quantise", hidden, lambda: ops.rmsnorm_quantize(x, residual, None, 1e-5, qkv), 3 * size + 1),  # noqa: B023
            ("quantise", config.q_size, lambda: ops.quantize_activation(attended, o), size + 1),  # noqa: B023
            ("swiglu + quantise", inner, lambda: ops.silu_mul_quantize(gate_up, down), 2 * size + 1),  # noqa: B023
        )
        for name, width, work, bytes_per_channel in works:
            ours = _rotated([work] * 4, device, repetitions)
            yield _record(
                shape.model, name, str(width), tokens, ours, None, tokens * width * bytes_per_channel, 0.0, qkv.path,
                device,
            )  # fmt: skip


def _rotated(works: Sequence[Callable[[], object]], device: torch.device, repetitions: int) -> float:
    """Microseconds of one of `works`, run one after the other."""
    for work in works:
        work()
    if device.type != "cuda":
        return 1e6 * statistics.median(measure(work, device, repetitions, 0).median for work in works)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return 1e6 * measure(graph.replay, device, repetitions).median / len(works)


def _copies(weight_bytes: float) -> int:
    return max(1, min(MAX_COPIES, round(COLD_BYTES / weight_bytes)))


def _record(
    model: str,
    op: str,
    shape: str,
    tokens: int,
    ours: float,
    base: float | None,
    moved: float,
    operations: float,
    path: str,
    device: torch.device,
) -> KernelRecord:
    limits = limits_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    limit = None
    if limits is not None:
        limit = 1e6 * max(moved / limits.bandwidth, operations / limits.rate(path)) / ours
    return KernelRecord(model, op, shape, tokens, ours, base, moved, operations, path, limit)
