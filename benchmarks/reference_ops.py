"""`kernels.reference` as a model's operations on any device, in float32: the checkpoint's exact semantics at GPU speed.

The integer products are exact (`reference.integer_matmul`), so only the order of float sums in norms, attention and
16-bit columns can differ from the CPU path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.export.checkpoint import PackedCheckpoint
from w4a4.kernels.layout import ActMode, LinearLayout
from w4a4.kernels.ops import StoredLinear
from w4a4.kernels.reference import QuantizedActivation, quantize_activation, rms_norm, w4ax_gemm
from w4a4.serve.attention import ReferenceAttention
from w4a4.serve.model import CausalLM


@dataclass(frozen=True)
class ReferenceLinear:
    """Linears that share an input, stacked by rows."""

    layout: LinearLayout
    out_sizes: tuple[int, ...]
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    perm: Tensor | None
    bias: Tensor | None
    path: str = "reference"


class ReferenceOps:
    """`serve.model.LinearOps`."""

    def fuse_linears(self, linears: Sequence[StoredLinear], device: torch.device, act: ActMode) -> ReferenceLinear:
        sizes = tuple(linear.layout.out_features for linear in linears)
        first = linears[0]
        biases = [
            torch.zeros(n) if one.bias is None else one.bias.float() for one, n in zip(linears, sizes, strict=True)
        ]
        return ReferenceLinear(
            layout=replace(first.layout.at(act), out_features=sum(sizes)),
            out_sizes=sizes,
            weights=tuple(torch.cat(parts).to(device) for parts in zip(*(one.weights for one in linears), strict=True)),
            weight_scales=torch.cat([one.weight_scales for one in linears]).to(device),
            perm=None if first.perm is None else first.perm.to(device),
            bias=torch.cat(biases).to(device),
        )

    def quantize_activation(self, x: Tensor, linear: ReferenceLinear) -> QuantizedActivation:
        return quantize_activation(x, linear.layout, linear.perm)

    def rmsnorm_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, linear: ReferenceLinear
    ) -> tuple[Tensor, QuantizedActivation]:
        hidden = x if residual is None else x + residual
        return hidden, self.quantize_activation(rms_norm(hidden, weight, eps), linear)

    def silu_mul_quantize(self, gate_up: Tensor, linear: ReferenceLinear) -> QuantizedActivation:
        gate, up = gate_up.chunk(2, dim=1)
        return self.quantize_activation(F.silu(gate) * up, linear)

    def linear_forward(self, activation: QuantizedActivation, linear: ReferenceLinear) -> Tensor:
        return w4ax_gemm(activation, linear.weights, linear.weight_scales, linear.layout, linear.bias)


def reference_model(checkpoint: PackedCheckpoint, device: str, act: ActMode, kv_bits: int) -> CausalLM:
    """`checkpoint` through the reference alone, on any device, float32 between the integer products."""
    model = CausalLM(checkpoint, device, act, kv_bits, ReferenceOps(), torch.float32)
    model.attention = ReferenceAttention(model.config, model.kv_layout(), model.use_qk_hadamard, model.device)
    return model
