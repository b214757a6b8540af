"""A packed checkpoint as a model that runs: token ids and KV pages in, hidden states and logits out.

One model code for a CPU and a GPU: everything that differs stands behind `kernels.ops` and `kernels.kv4`. It knows
nothing of requests, scheduling or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import UnsupportedError
from w4a4.kernels import ops
from w4a4.kernels.cpu import head_matmul
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, allocate_pages
from w4a4.kernels.layout import ActMode
from w4a4.kernels.reference import rms_norm
from w4a4.serve.attention import HeadWeights, PagedAttention
from w4a4.serve.step_batches import DecodeBatch, KnownBatch, counting

PAGE_SIZE = 16


class PackedModel(Protocol):
    """Where a model's tensors come from: a checkpoint, or random numbers. `tensor` returns what is not packed."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def quantization(self) -> Mapping[str, Any]: ...
    def linear(self, prefix: str) -> ops.StoredLinear: ...
    def tensor(self, name: str) -> Tensor: ...


class LinearOps(Protocol):
    """What multiplies: the module `kernels.ops`, or a baseline with the same functions. The type of a fused linear and
    of an activation is its own; `out_sizes` and `path` of a linear are read here.
    """

    def fuse_linears(self, linears: Sequence[ops.StoredLinear], device: torch.device, act: ActMode) -> Any: ...
    def quantize_activation(self, x: Tensor, linear: Any) -> Any: ...
    def rmsnorm_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, linear: Any
    ) -> tuple[Tensor, Any]: ...
    def silu_mul_quantize(self, gate_up: Tensor, linear: Any) -> Any: ...
    def linear_forward(self, activation: Any, linear: Any) -> Tensor: ...


@dataclass(frozen=True)
class KVCache:
    """The KV pages of all layers. Sink pages, one per sink slot, stand behind the `num_pages` ordinary ones."""

    layout: KVPageLayout
    num_pages: int
    pages: tuple[Tensor, ...]  # per layer uint8 [num_pages + num_sink_slots, kv_heads, bytes]

    def batch(
        self, block_tables: Tensor, query_start: Tensor, context_lengths: Tensor, sink_slots: Tensor | None
    ) -> KVBatch:
        """The step's indices as the KV kernels want them; `sink_slots` int [B] is ignored where there are no sinks."""
        return KVBatch(block_tables, query_start, context_lengths, self.sink_pages(sink_slots))

    def known_batch(
        self, block_tables: Tensor, starts: list[int], lengths: list[int], sink_slots: Tensor | None
    ) -> KVBatch:
        """The same with query_start and context_lengths as numbers: nothing waits for the device to tell them."""
        device = block_tables.device
        # from pinned memory, so that the copies do not wait for the device either
        query_start, context_lengths = (
            torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
            for values in (starts, lengths)
        )
        sink_pages = self.sink_pages(sink_slots)
        return KnownBatch(block_tables, query_start, context_lengths, sink_pages, (starts, lengths))

    def decode_batch(self, block_tables: Tensor, context_lengths: Tensor, sink_slots: Tensor | None) -> DecodeBatch:
        """The same for a step in which every sequence has one new token, or none (context length 0: padding)."""
        starts = counting(context_lengths.shape[0] + 1, context_lengths.device)
        return DecodeBatch(block_tables, starts, context_lengths, self.sink_pages(sink_slots))

    def sink_pages(self, sink_slots: Tensor | None) -> Tensor | None:
        """The pages of sink slots; None where there are no sinks."""
        if not self.layout.num_sinks:
            return None
        assert sink_slots is not None
        return sink_slots + self.num_pages


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights on the device: fused linears of the model's `LinearOps`, and the rest.

    Norm gains are None where they are all ones (folded into the readers).
    """

    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    input_norm: Tensor | None
    post_attention_norm: Tensor | None
    heads: HeadWeights


class CausalLM:
    """A packed model on one device.

    Args:
        act: "map" runs the checkpoint's precision map, "a8" every 4-bit activation at 8 bits, "a16" none quantised.
        kv_bits: 4 or 16; None takes the checkpoint's.
        linear_ops: what multiplies; None: `kernels.ops`.
        dtype: of the residual stream; None: float32 on a CPU, bf16 on a GPU.
    Raises:
        UnsupportedError: no kernels for the device.
        CheckpointError: a tensor is missing or makes no sense.
    """

    def __init__(
        self,
        checkpoint: PackedModel,
        device: torch.device | str = "cpu",
        act: ActMode = "map",
        kv_bits: int | None = None,
        linear_ops: LinearOps | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.ops: LinearOps = linear_ops or ops
        self.device = torch.device(device)
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.act = act
        kv = checkpoint.quantization["kv_cache"]
        self.kv_bits = int(kv["bits"]) if kv_bits is None else kv_bits
        self.use_qk_hadamard = bool(kv["qk_hadamard"])
        self.num_sinks = int(kv["sink_tokens"]) if self.kv_bits == 4 else 0
        self.has_k_mean = bool(kv["k_mean"])
        try:
            self.layers = [self._layer(checkpoint, index) for index in range(self.config.num_layers)]
        except ops.UnsupportedDeviceError as error:
            raise UnsupportedError(str(error), "run with --device cpu") from error
        embedding = checkpoint.tensor("model.embed_tokens.weight").to(self.device)
        self.final_norm = self._gain(checkpoint.tensor("model.norm.weight"))
        tied = self.config.tie_word_embeddings
        self.head = self._float(embedding if tied else checkpoint.tensor("lm_head.weight"))
        self.embedding = self.head if tied else embedding  # as stored: rows are widened when they are looked up
        self.attention = PagedAttention(self.config, self.kv_layout(), self.use_qk_hadamard, self.device)

    def _float(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def _gain(self, weight: Tensor) -> Tensor | None:
        return None if bool((weight == 1).all()) else self._float(weight)

    def _layer(self, checkpoint: PackedModel, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."

        def fused(*names: str) -> Any:
            return self.ops.fuse_linears([checkpoint.linear(prefix + name) for name in names], self.device, self.act)

        def norm(name: str) -> Tensor:
            return self._float(checkpoint.tensor(prefix + name))

        k_mean = None
        if self.has_k_mean:
            k_mean = checkpoint.tensor(prefix + "self_attn.k_mean").to(self.device).view(-1, self.config.head_dim)
        return DecoderLayer(
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o=fused("self_attn.o_proj"),
            gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
            input_norm=self._gain(norm("input_layernorm.weight")),
            post_attention_norm=self._gain(norm("post_attention_layernorm.weight")),
            heads=HeadWeights(
                norms=(norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight"))
                if self.config.qk_norm
                else None,
                k_mean=k_mean,
                window=self.config.sliding_windows[index],
            ),
        )

    def linears(self) -> dict[str, Any]:
        """Every launch of the GEMM in order of use: "model.layers.0.self_attn.qkv_proj", ..."""
        names = (("self_attn.qkv_proj", "qkv"), ("self_attn.o_proj", "o"), ("mlp.gate_up_proj", "gate_up"),
                 ("mlp.down_proj", "down"))  # fmt: skip
        return {
            f"model.layers.{index}.{name}": getattr(layer, field)
            for index, layer in enumerate(self.layers)
            for name, field in names
        }

    def paths(self) -> dict[str, str]:
        """What multiplies each linear: "model.layers.0.self_attn.qkv_proj" -> "reference-cpu"."""
        return {name: linear.path for name, linear in self.linears().items()}

    def attention_path(self) -> str:
        return self.attention.path

    def head_path(self) -> str:
        return "float32, tiles of 4 rows" if self.device.type == "cpu" else "bf16-cublas"

    def kv_layout(self) -> KVPageLayout:
        config = self.config
        return KVPageLayout(config.num_kv_heads, config.head_dim, PAGE_SIZE, self.kv_bits, self.num_sinks)

    def allocate_cache(self, num_pages: int, num_sink_slots: int) -> KVCache:
        layout = self.kv_layout()
        total = num_pages + (num_sink_slots if self.num_sinks else 0)
        return KVCache(layout, num_pages, tuple(allocate_pages(layout, total, self.device) for _ in self.layers))

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, batch: KVBatch, cache: KVCache) -> Tensor:
        """Run int64 [T] new tokens of a batch, writing their K and V: final normed hidden states [T, H]."""
        config = self.config
        step = self.attention.begin(batch)
        residual = self.embedding[input_ids].to(self.dtype)
        update: Tensor | None = None
        for layer, pages in zip(self.layers, cache.pages, strict=True):
            residual, activation = self.ops.rmsnorm_quantize(
                residual, update, layer.input_norm, config.rms_norm_eps, layer.qkv
            )
            attended = self.attention.attend(self.ops.linear_forward(activation, layer.qkv), layer.heads, pages, step)
            activation = self.ops.quantize_activation(attended.to(self.dtype), layer.o)
            update = self.ops.linear_forward(activation, layer.o)
            residual, activation = self.ops.rmsnorm_quantize(
                residual, update, layer.post_attention_norm, config.rms_norm_eps, layer.gate_up
            )
            activation = self.ops.silu_mul_quantize(self.ops.linear_forward(activation, layer.gate_up), layer.down)
            update = self.ops.linear_forward(activation, layer.down)
        assert update is not None
        if self.device.type == "cpu":
            return rms_norm(residual + update, self.final_norm, config.rms_norm_eps)
        from w4a4.serve.baseline_kernels import rmsnorm

        return rmsnorm(residual, update, self.final_norm, config.rms_norm_eps, is_fp8=False)[1]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, V] of hidden states [R, H]."""
        if self.device.type == "cpu":
            return head_matmul(hidden, self.head)
        return torch.mm(hidden, self.head.T, out_dtype=torch.float32)

    @torch.inference_mode()
    def hidden_states(self, tokens: Tensor, chunk: int = 512) -> Tensor:
        """Final normed hidden states [B, T, H] of whole sequences int [B, T], each prefilled in chunks through fresh
        KV pages."""
        num_tokens = tokens.shape[1]
        num_pages = -(-num_tokens // PAGE_SIZE)
        out = []
        for sequence in tokens.to(self.device, torch.int64):
            cache = self.allocate_cache(num_pages, 1)
            table = torch.arange(num_pages, dtype=torch.int32, device=self.device)[None]
            for start in range(0, num_tokens, chunk):
                ids = sequence[start : start + chunk]
                sinks = torch.zeros(1, dtype=torch.int32, device=self.device)
                batch = cache.known_batch(table, [0, len(ids)], [start + len(ids)], sinks)
                out.append(self.forward(ids, batch, cache))
        return torch.cat(out).view(*tokens.shape, -1)

    def score(self, tokens: Tensor, chunk: int = 512) -> Tensor:
        """Logits f32 [B, T, V] of `hidden_states`."""
        hidden = self.hidden_states(tokens, chunk)
        return self.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)
