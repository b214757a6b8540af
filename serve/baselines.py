"""What people would run instead, in the same model code: bf16 linears by cuBLAS, fp8 linears by `torch._scaled_mm`, for
few tokens by a Triton kernel of ours (`baseline_fp8`), as `torch._scaled_mm` is no faster than bf16 there.

The weights are those of the packed model, dequantised and brought back to the order of its inputs, so a baseline
computes the same function without quantised activations: no permutation, no online Hadamard, a 16-bit KV cache. Norms
and SwiGLU are one fused kernel each, as in the packed model; fp8 quantises in them, per token, and weights per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import UnsupportedError
from w4a4.kernels import reference
from w4a4.kernels.layout import ActMode
from w4a4.kernels.ops import StoredLinear
from w4a4.kernels.reference import rms_norm
from w4a4.serve.model import CausalLM, PackedModel

Kind = Literal["bf16", "fp8"]
FP8_MAX = 448.0


@dataclass(frozen=True)
class BaselineLinear:
    """Fused linears that share an input. weight: [N, K], bf16 (float32 on a CPU) or float8 with scales f32 [1, N]."""

    out_sizes: tuple[int, ...]
    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    path: str

    @property
    def weight_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


@dataclass(frozen=True)
class BaselineActivation:
    """What `linear_forward` takes. values: [T, K]; in float8 with scales f32 [rows, 1] and rows beyond `tokens`."""

    values: Tensor
    scales: Tensor | None
    tokens: int


@dataclass(frozen=True)
class _PlainCache:
    """A packed model whose KV cache is an ordinary one: 16 bit, nothing done to keys online."""

    packed: PackedModel

    @property
    def config(self) -> ModelConfig:
        return self.packed.config

    @property
    def quantization(self) -> Mapping[str, Any]:
        kv = {"bits": 16, "qk_hadamard": False, "k_mean": False, "sink_tokens": 0}
        return {**self.packed.quantization, "kv_cache": kv}

    def linear(self, prefix: str) -> StoredLinear:
        return self.packed.linear(prefix)

    def tensor(self, name: str) -> Tensor:
        return self.packed.tensor(name)


def baseline_model(packed: PackedModel, device: torch.device, kind: Kind) -> CausalLM:
    """The same function as the packed model with activations in 16 bit (or fp8), as a model of its own."""
    return CausalLM(_PlainCache(packed), device, linear_ops=BaselineOps(kind))


class BaselineOps:
    """The four operations of `kernels.ops` that a model runs, for one kind of baseline. fp8 needs a GPU."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def fuse_linears(
        self, linears: Sequence[StoredLinear], device: torch.device | str = "cpu", act: ActMode = "map"
    ) -> BaselineLinear:
        """As `ops.fuse_linears`; `act` is of no concern here."""
        device = torch.device(device)
        if self.kind == "fp8" and device.type != "cuda":
            raise UnsupportedError(f"the fp8 baseline needs a GPU, got {device}", "--baseline bf16")
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        weights, scales = [], []
        for linear in linears:
            dense = dense_weight(linear, device)
            if self.kind == "fp8":
                scale = dense.abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
                weights.append((dense / scale).to(torch.float8_e4m3fn))
                scales.append(scale)
            else:
                weights.append(dense.to(dtype))
            del dense
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                torch.zeros(linear.layout.out_features) if linear.bias is None else linear.bias.cpu()
                for linear in linears
            ]
            bias = torch.cat([part.to(device, dtype) for part in parts])
        path = "bf16-cublas" if device.type == "cuda" else "float32-cpu"
        return BaselineLinear(
            out_sizes=tuple(linear.layout.out_features for linear in linears),
            weight=_joined(weights),
            scales=torch.cat(scales).T.contiguous() if scales else None,
            bias=bias,
            path="fp8-scaled_mm, Triton for few tokens" if self.kind == "fp8" else path,
        )

    def rmsnorm_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, linear: BaselineLinear
    ) -> tuple[Tensor, BaselineActivation]:
        if x.device.type == "cpu":
            hidden = x if residual is None else x + residual
            return hidden, BaselineActivation(rms_norm(hidden, weight, eps), None, x.shape[0])
        from w4a4.serve.baseline_kernels import rmsnorm

        hidden, values, scales = rmsnorm(x, residual, weight, eps, self.kind == "fp8")
        return hidden, BaselineActivation(values, scales, x.shape[0])

    def quantize_activation(self, x: Tensor, linear: BaselineLinear) -> BaselineActivation:
        if self.kind == "bf16":
            return BaselineActivation(x, None, x.shape[0])
        from w4a4.serve.baseline_kernels import quantize

        return BaselineActivation(*quantize(x), x.shape[0])

    def silu_mul_quantize(self, gate_up: Tensor, linear: BaselineLinear) -> BaselineActivation:
        if gate_up.device.type == "cpu":
            gate, up = torch.chunk(gate_up, 2, dim=1)
            return BaselineActivation(F.silu(gate) * up, None, gate.shape[0])
        from w4a4.serve.baseline_kernels import silu_mul

        return BaselineActivation(*silu_mul(gate_up, self.kind == "fp8"), gate_up.shape[0])

    def linear_forward(self, activation: BaselineActivation, linear: BaselineLinear) -> Tensor:
        if self.kind == "bf16":
            return F.linear(activation.values, linear.weight, linear.bias)
        assert activation.scales is not None and linear.scales is not None
        from w4a4.serve.baseline_fp8 import product, tile_for

        rows, width = linear.weight.shape
        tile = tile_for(rows, activation.tokens)
        if tile is not None and rows % tile.rows == 0 and width % (tile.columns * tile.parts) == 0:
            return product(
                activation.values, activation.scales, linear.weight, linear.scales, linear.bias, activation.tokens, tile
            )
        y = torch._scaled_mm(
            activation.values,
            linear.weight.T,
            scale_a=activation.scales,
            scale_b=linear.scales,
            bias=linear.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y[: activation.tokens]


def dense_weight(linear: StoredLinear, device: torch.device | str) -> Tensor:
    """`reference.dense_weight` of a stored linear, computed on `device`."""
    weights = tuple(weight.to(device) for weight in linear.weights)
    perm = None if linear.perm is None else linear.perm.to(device)
    return reference.dense_weight(weights, linear.weight_scales.to(device), linear.layout, perm)


def _joined(weights: list[Tensor]) -> Tensor:
    """Rows one after the other. One part is not copied: 70B in float8 leaves little room."""
    if len(weights) == 1:
        return weights[0]
    if weights[0].dtype == torch.float8_e4m3fn:  # which torch.cat does not take
        return torch.cat([weight.view(torch.int8) for weight in weights]).view(torch.float8_e4m3fn)
    return torch.cat(weights)
