"""A decoder of a few lines, written for the property tests: weights in, logits out, every step visible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor


@dataclass
class MiniModel:
    """Grouped-query attention with RoPE (Hugging Face's halves), gated feed-forward, root-mean-square norms."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 80
    inner: int = 96
    has_bias: bool = False
    has_qk_norm: bool = False
    num_layers: int = 2
    vocabulary: int = 50
    layers: list[dict[str, Tensor]] = field(default_factory=list)
    embedding: Tensor = field(default_factory=lambda: torch.empty(0))
    final_gain: Tensor = field(default_factory=lambda: torch.empty(0))
    lm_head: Tensor = field(default_factory=lambda: torch.empty(0))
    seen: dict[str, Tensor] = field(default_factory=dict)  # of the last layer: post-RoPE q, k, then v, o, h

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator) * scale

        def gain(width: int) -> Tensor:
            return torch.rand(width, generator=generator) * 1.5 + 0.2

        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        for _ in range(self.num_layers):
            layer = {f"{name}.weight": random(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
            if self.has_bias:
                layer |= {f"{name}.bias": random(shape[0], scale=0.5) for name, shape in shapes.items()}
            if self.has_qk_norm:
                layer |= {f"self_attn.{n}_norm.weight": gain(self.head_dim) for n in "qk"}
            layer |= {f"{n}.weight": gain(self.hidden) for n in ("input_layernorm", "post_attention_layernorm")}
            self.layers.append(layer)
        self.embedding, self.lm_head = random(self.vocabulary, self.hidden), random(self.vocabulary, self.hidden)
        self.final_gain = gain(self.hidden)

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [T] -> logits [T, V]."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = x + self._attention(layer, _norm(x, layer["input_layernorm.weight"]))
            x = x + self._feed_forward(layer, _norm(x, layer["post_attention_layernorm.weight"]))
        return _norm(x, self.final_gain) @ self.lm_head.T

    def _attention(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        tokens = x.shape[0]
        query, key, value = (
            _linear(layer, f"self_attn.{n}_proj", x).view(tokens, -1, self.head_dim).transpose(0, 1) for n in "qkv"
        )
        if self.has_qk_norm:
            query = _norm(query, layer["self_attn.q_norm.weight"])
            key = _norm(key, layer["self_attn.k_norm.weight"])
        query, key = _rope(query), _rope(key)
        group = self.num_heads // self.num_kv_heads
        scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) / self.head_dim**0.5
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)
        mixed = (scores + mask).softmax(-1) @ value.repeat_interleave(group, 0)
        output = mixed.transpose(0, 1).reshape(tokens, -1)
        self.seen = {"q": query, "k": key, "v": value, "o": output}
        return _linear(layer, "self_attn.o_proj", output)

    def _feed_forward(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(_linear(layer, "mlp.gate_proj", x))
        inner = gate * _linear(layer, "mlp.up_proj", x)
        self.seen["h"] = inner
        return _linear(layer, "mlp.down_proj", inner)

    def apply(self, fold: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self.layers = [fold(layer) for layer in self.layers]


def _linear(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def _rope(x: Tensor) -> Tensor:
    tokens, width = x.shape[-2:]
    frequency = 100.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(tokens)[:, None] * frequency
    angle = torch.cat([angle, angle], 1)
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * angle.cos() + turned * angle.sin()


@pytest.fixture
def mini_model() -> type[MiniModel]:
    return MiniModel


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(1))
