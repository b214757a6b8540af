"""The float decoder that calibration, quantisation and source evaluation share: one layer at a time, whole sequences.

It keeps no KV cache and owns no weights: a layer's weights come in as a dict keyed by short Hugging Face names
("self_attn.q_proj.weight"). The packed model that serves is `serve/model.py`; the two meet only in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.source import Source
from w4a4.configs.architecture import ModelConfig
from w4a4.kernels.reference import rms_norm
from w4a4.kernels.rope import apply_rope, rope_frequencies, rope_tables

Weights = Mapping[str, Tensor]
Observe = Callable[[str, Tensor], None]
"""Called with a point's name and its tensor: `attn_norm`, `mlp_norm` [B, T, H] (normed, before the gain);
`attn_in`, `mlp_in` [B, T, H]; `query`, `key` [B, T, heads, D] (after RoPE); `value` [B, T, kv_heads, D];
`attn_out` [B, T, heads * D]; `mlp_hidden` [B, T, I]."""

GPU_ELEMENTS = 2**26
"""Of the widest activation that a GPU computes at a time, 256 MiB; of attention's scores eight times as many."""

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
INPUT_OF = dict(zip(ATTENTION + MLP, ("attn_in",) * 3 + ("attn_out",) + ("mlp_in",) * 2 + ("mlp_hidden",), strict=True))
"""Which observed point each linear reads."""


def layer_weights(source: Source, layer: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of decoder layer `layer`, float32 on `device`, by short name."""
    prefix = f"model.layers.{layer}."
    names = sorted(name for name in source.names() if name.startswith(prefix))
    return {name.removeprefix(prefix): source.tensor(name).to(device) for name in names}


def sequences_at_a_time(config: ModelConfig, length: int, device: torch.device | str) -> int:
    """How many sequences of `length` tokens go through a layer together: one on a CPU, on a GPU as many as fill it."""
    if torch.device(device).type == "cpu":
        return 1
    widest = length * max(config.intermediate_size, config.num_heads * length // 8)
    return max(1, GPU_ELEMENTS // widest)


def unobserved(_point: str, _tensor: Tensor) -> None:
    """The observer that looks away."""


class LayerMath:
    """The arithmetic of one decoder layer, in stages, so that GPTQ can stop between them.

    All tensors are float [B, T, ·] on one device; T is at most the model's max_position_embeddings.
    """

    def __init__(self, config: ModelConfig, layer: int, num_tokens: int, device: torch.device | str = "cpu") -> None:
        self.config = config
        frequencies, factor = rope_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        positions = torch.arange(num_tokens, device=device)
        self.cos, self.sin = rope_tables(positions, frequencies.to(device), factor)
        window = config.sliding_windows[layer]
        self.mask: Tensor | None = None
        if window is not None and window < num_tokens:
            distance = positions[:, None] - positions[None, :]
            self.mask = (distance >= 0) & (distance < window)

    def norm(self, x: Tensor) -> Tensor:
        """RMSNorm without its gain."""
        return rms_norm(x, None, self.config.rms_norm_eps)

    def heads(self, weights: Weights, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split projections into heads [B, T, heads, D], norm q and k where the model does, and rotate them."""
        config = self.config
        q = q.view(*q.shape[:-1], config.num_heads, config.head_dim)
        k = k.view(*k.shape[:-1], config.num_kv_heads, config.head_dim)
        v = v.view(*v.shape[:-1], config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q = rms_norm(q, weights["self_attn.q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, weights["self_attn.k_norm.weight"], config.rms_norm_eps)
        return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal (and windowed) attention of rotated heads [B, T, heads, D] -> [B, T, heads * D]."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(-2)

    def forward(self, weights: Weights, x: Tensor, observe: Observe = unobserved) -> Tensor:
        """The whole layer: residual stream [B, T, H] in, residual stream out."""

        def linear(name: str, inputs: Tensor) -> Tensor:
            return F.linear(inputs, weights[name + ".weight"], weights.get(name + ".bias"))

        normed = self.norm(x)
        observe("attn_norm", normed)
        inputs = normed * weights["input_layernorm.weight"]
        observe("attn_in", inputs)
        q, k, v = self.heads(weights, *(linear(name, inputs) for name in ATTENTION[:3]))
        for point, tensor in (("query", q), ("key", k), ("value", v)):
            observe(point, tensor)
        attended = self.attend(q, k, v)
        observe("attn_out", attended)
        x = x + linear("self_attn.o_proj", attended)
        normed = self.norm(x)
        observe("mlp_norm", normed)
        inputs = normed * weights["post_attention_layernorm.weight"]
        observe("mlp_in", inputs)
        hidden = F.silu(linear("mlp.gate_proj", inputs)) * linear("mlp.up_proj", inputs)
        observe("mlp_hidden", hidden)
        return x + linear("mlp.down_proj", hidden)


def lm_head_weight(source: Source) -> Tensor:
    """The output projection [V, H], which is the embedding where the two are tied."""
    return source.tensor("model.embed_tokens.weight" if source.config.tie_word_embeddings else "lm_head.weight")


@torch.inference_mode()
def run_layers(
    source: Source, tokens: Tensor, observe: Callable[[int], Observe] | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, Tensor]]:
    """Run token ids [B, T] through all layers, layer by layer, a few sequences at a time inside a layer.

    Memory: one layer's weights and, on `device` too, the residual stream of all sequences. Yields (layer, residual
    stream [B, T, H]) after each layer; the tensor is reused by the next.
    """
    embedding = source.tensor("model.embed_tokens.weight")
    hidden = embedding[tokens].to(device)
    del embedding
    together = sequences_at_a_time(source.config, tokens.shape[1], device)
    for layer in range(source.config.num_layers):
        weights = layer_weights(source, layer, device)
        math = LayerMath(source.config, layer, tokens.shape[1], device)
        watch = observe(layer) if observe else unobserved
        for rows in torch.split(hidden, together):
            rows.copy_(math.forward(weights, rows, watch))
        yield layer, hidden


class FloatModel:
    """A source model held in memory: token ids [B, T] -> float32 logits [B, T, V]. For evaluation and comparison."""

    def __init__(self, source: Source, device: torch.device | str = "cpu") -> None:
        self.config = source.config
        self.device = device
        self.embedding = source.tensor("model.embed_tokens.weight").to(device)
        self.layers = [layer_weights(source, layer, device) for layer in range(source.config.num_layers)]
        self.final_gain = source.tensor("model.norm.weight").to(device)
        self.head = self.embedding if source.config.tie_word_embeddings else lm_head_weight(source).to(device)

    @torch.inference_mode()
    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Final normed hidden states [B, T, H]."""
        x = self.embedding[tokens.to(self.device)]
        for layer, weights in enumerate(self.layers):
            x = LayerMath(self.config, layer, tokens.shape[1], self.device).forward(weights, x)
        return rms_norm(x, self.final_gain, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H]."""
        return F.linear(hidden, self.head)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden_states(tokens))
