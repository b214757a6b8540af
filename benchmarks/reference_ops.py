"""`kernels.reference` as a model that scores whole windows, several at a time: the checkpoint's exact semantics at GPU
speed.

Integer products are exact, so only the order of float sums in norms, attention and 16-bit columns can differ from the
CPU path.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.export.checkpoint import PackedCheckpoint
from w4a4.kernels.kv4 import KVPageLayout, prepare_qk
from w4a4.kernels.layout import ActMode, LinearLayout
from w4a4.kernels.ops import StoredLinear
from w4a4.kernels.reference import (
    QuantizedActivation,
    dequantize_kv,
    integer_matmul,
    quantize_activation,
    quantize_kv,
    rms_norm,
    w4ax_gemm,
)
from w4a4.kernels.rope import rope_frequencies, rope_tables
from w4a4.serve.attention import HeadWeights
from w4a4.serve.evaluate import LazyLogits
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
        return w4ax_gemm(
            activation, linear.weights, linear.weight_scales, linear.layout, linear.bias, matmul=_integer_product
        )


def _integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """`reference.integer_matmul`, on a GPU through its int8 units where they take the shape."""
    tokens, columns = codes.shape
    if codes.is_cuda and tokens > 16 and columns % 16 == 0 and weight.shape[0] % 16 == 0:
        return torch._int_mm(codes.contiguous(), weight.T)
    return integer_matmul(codes, weight)


@dataclass(frozen=True)
class _Windows:
    """A batch of whole windows: B of T tokens."""

    shape: tuple[int, int]


class WindowAttention:
    """What `kernels.kv4` defines, for windows that start at position 0: K and V as they come back from pages."""

    path = "reference"

    def __init__(self, config: ModelConfig, layout: KVPageLayout, use_hadamard: bool, device: torch.device) -> None:
        self.config, self.layout, self.use_hadamard = config, layout, use_hadamard
        frequencies, self.factor = rope_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.frequencies = frequencies.to(device)

    def begin(self, batch: _Windows) -> tuple[_Windows, Tensor, Tensor]:
        positions = torch.arange(batch.shape[1], device=self.frequencies.device)
        cos, sin = rope_tables(positions, self.frequencies, self.factor)
        return batch, cos.repeat(batch.shape[0], 1), sin.repeat(batch.shape[0], 1)

    def attend(self, qkv: Tensor, weights: HeadWeights, _pages: None, step: tuple[_Windows, Tensor, Tensor]) -> Tensor:
        config, (windows, cos, sin) = self.config, step
        groups = config.num_heads // config.num_kv_heads
        q, k, v = torch.split(
            qkv.view(qkv.shape[0], -1, config.head_dim), [config.num_heads, config.num_kv_heads, config.num_kv_heads], 1
        )
        if weights.norms is not None:
            q, k = (rms_norm(x, gain, config.rms_norm_eps) for x, gain in zip((q, k), weights.norms, strict=True))
        q, k = prepare_qk(q, k, cos, sin, weights.k_mean, self.use_hadamard)
        q, k, v = (x.view(*windows.shape, *x.shape[1:]).transpose(1, 2) for x in (q, self._kept(k, windows),
                                                                                self._kept(v, windows)))  # fmt: skip
        mask = None
        if weights.window is not None and weights.window < windows.shape[1]:
            positions = torch.arange(windows.shape[1], device=q.device)
            distance = positions[:, None] - positions
            mask = (distance >= 0) & (distance < weights.window)
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=mask, is_causal=mask is None
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _kept(self, x: Tensor, windows: _Windows) -> Tensor:
        """x [B T, Hkv, D] as it comes back from pages."""
        exact = x.to(self.layout.dtype).float()
        if self.layout.bits == 16:
            return exact
        rounded = dequantize_kv(*quantize_kv(x)).view(*windows.shape, *x.shape[1:])
        rounded[:, : self.layout.num_sinks] = exact.view_as(rounded)[:, : self.layout.num_sinks]
        return rounded.view_as(x)


class WindowModel:
    """A packed model through the reference alone, on any device, float32 between the integer products."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> LazyLogits:
        """Logits [B, T, V] of windows of token ids [B, T]."""
        model, ops = self.model, self.model.ops
        ids = tokens.to(model.device, torch.int64)
        step = model.attention.begin(_Windows(tuple(ids.shape)))
        eps = model.config.rms_norm_eps
        residual, update = model.embedding[ids.flatten()].float(), None
        for layer in model.layers:
            residual, activation = ops.rmsnorm_quantize(residual, update, layer.input_norm, eps, layer.qkv)
            attended = model.attention.attend(ops.linear_forward(activation, layer.qkv), layer.heads, None, step)
            update = ops.linear_forward(ops.quantize_activation(attended, layer.o), layer.o)
            residual, activation = ops.rmsnorm_quantize(residual, update, layer.post_attention_norm, eps, layer.gate_up)
            activation = ops.silu_mul_quantize(ops.linear_forward(activation, layer.gate_up), layer.down)
            update = ops.linear_forward(activation, layer.down)
        hidden = rms_norm(residual + update, model.final_norm, eps)
        return LazyLogits(hidden.view(*ids.shape, -1), self._head)

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.head)


def window_models(
    checkpoint: PackedCheckpoint, device: str, paths: Sequence[tuple[ActMode, int]]
) -> dict[tuple[ActMode, int], WindowModel]:
    """`checkpoint` at several (activation mode, KV bits), its weights held once."""
    loaded = CausalLM(checkpoint, device, "map", 16, ReferenceOps(), torch.float32)
    kv = checkpoint.quantization["kv_cache"]
    models = {}
    for act, kv_bits in paths:
        model = copy(loaded)
        model.act, model.kv_bits = act, kv_bits
        model.num_sinks = int(kv["sink_tokens"]) if kv_bits == 4 else 0
        model.layers = [
            replace(layer, **{name: _at(getattr(layer, name), act) for name in ("qkv", "o", "gate_up", "down")})
            for layer in loaded.layers
        ]
        model.attention = WindowAttention(model.config, model.kv_layout(), model.use_qk_hadamard, model.device)
        models[act, kv_bits] = WindowModel(model)
    return models


def _at(linear: ReferenceLinear, act: ActMode) -> ReferenceLinear:
    return replace(linear, layout=linear.layout.at(act))
