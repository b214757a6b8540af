"""KV4 in vLLM: our pages in its block pool, under `--kv-cache-dtype int4_per_token_head`.

That type of vLLM gives every token and kv-head head_dim + 8 bytes, which is what KV4 takes, so a block of n tokens is
n / 16 of our pages and neither the scheduler nor the prefix cache notices. A recipe that keeps the first positions of a
sequence in 16 bits needs a page more per sequence: every block gets one, and a sequence uses that of its first block
(9 pages for 128 tokens). vLLM's model has applied RoPE by the time we see q and k; the mean off the keys, the Hadamard,
the rounding and the attention are those of `kernels.kv4`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from w4a4.configs.errors import UnsupportedError
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, kv_attention, kv_rope_write
from w4a4.serve.integrations.vllm.versions import KV4_DTYPE, blocks_can_grow, head_major_layouts

logger = logging.getLogger(__name__)

BACKEND_PATH = f"{__name__}.KV4Backend"
SINK_BACKEND_PATH = f"{__name__}.KV4SinkBackend"
PAGE_TOKENS = 16
USUAL_BLOCK = 128


def use_kv4_backend(num_sinks: int) -> None:
    """Let this process attend through KV4. A GPU asks for `--attention-backend CUSTOM`; a CPU has one backend only,
    so that one is overridden, by vLLM's own registry, for the model of this process."""
    place = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
    if num_sinks and not blocks_can_grow():
        logger.warning(
            "w4a4: this vLLM has no room for the first %d positions in 16 bits: they are kept in 4 bits alone, which "
            "costs quality",
            num_sinks,
        )
        num_sinks = 0
    register_backend(place, SINK_BACKEND_PATH if num_sinks else BACKEND_PATH)


class KV4Method(BaseKVCacheMethod):
    """What the checkpoint says about an attention layer's cache, put on the layer: `k_mean`, `kv4_hadamard`,
    `kv4_sinks`."""

    def __init__(self, quant_config: Any, has_mean: bool, use_hadamard: bool, num_sinks: int) -> None:
        super().__init__(quant_config)
        self.has_mean, self.use_hadamard, self.num_sinks = has_mean, use_hadamard, num_sinks

    def create_weights(self, layer: Any) -> None:
        super().create_weights(layer)
        layer.kv4_hadamard = self.use_hadamard
        if self.has_mean:
            zeros = torch.zeros(layer.num_kv_heads, layer.head_size, dtype=torch.float32)
            mean = nn.Parameter(zeros, requires_grad=False)
            mean.weight_loader = load_own_heads  # type: ignore[attr-defined]
            layer.register_parameter("k_mean", mean)

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if layer.kv_cache_dtype == KV4_DTYPE and not isinstance(layer.impl, KV4Impl):
            raise UnsupportedError(
                f"{KV4_DTYPE} runs in {type(layer.impl).__name__}, which does not know this checkpoint's K and V",
                "add --attention-backend CUSTOM, or leave --kv-cache-dtype out",
            )


def load_own_heads(parameter: nn.Parameter, loaded: Tensor) -> None:
    """Copy this rank's kv-heads of a tensor [kv-heads, D]. Fewer heads than ranks: ranks share them."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    replicas = max(1, ranks // loaded.shape[0])
    count = parameter.shape[0]
    parameter.data.copy_(loaded.narrow(0, rank // replicas * count, count))


@dataclass
class KV4Metadata:
    """A step: its sequences in terms of our pages, where each token's K and V go, and the rotation that is left to do,
    which is none: cos 1 and sin 0, f32 [T, D / 2]."""

    num_actual_tokens: int
    layout: KVPageLayout
    batch: KVBatch
    slots: Tensor
    sink_slots: Tensor | None
    cos: Tensor
    sin: Tensor


class KV4Builder(AttentionMetadataBuilder):
    """From vLLM's blocks to our pages: block b is n pages from b * n on, the last one for sinks if any."""

    has_sinks = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.token_pages = kv_cache_spec.block_size // PAGE_TOKENS
        kv = vllm_config.quant_config.quantization["kv_cache"]
        self.num_sinks = int(kv["sink_tokens"]) if self.has_sinks else 0
        self.layout = KVPageLayout(
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            PAGE_TOKENS,
            4,
            self.num_sinks,
            _sink_dtype(vllm_config),
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KV4Metadata:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        blocks = common.block_table_tensor[:count].to(torch.int32)
        first = blocks * (self.token_pages + (self.num_sinks > 0))
        pages = first.unsqueeze(-1) + torch.arange(self.token_pages, dtype=torch.int32, device=blocks.device)
        batch = KVBatch(
            pages.flatten(1),
            common.query_start_loc[: count + 1].to(torch.int32),
            common.seq_lens[:count].to(torch.int32),
            first[:, 0] + self.token_pages if self.num_sinks else None,
        )
        slots, sink_slots = batch.slots(self.layout), batch.sink_slots(self.layout)
        shape = common.num_actual_tokens, self.layout.head_dim // 2
        cos = torch.ones(shape, dtype=torch.float32, device=blocks.device)
        return KV4Metadata(len(cos), self.layout, batch, slots, sink_slots, cos, torch.zeros_like(cos))


class KV4SinkBuilder(KV4Builder):
    has_sinks = True


def _sink_dtype(vllm_config: Any) -> torch.dtype:
    """Of keys and values in 16 bits: bf16 but for a model in float16."""
    return torch.float16 if vllm_config.model_config.dtype == torch.float16 else torch.bfloat16


class KV4Impl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        if (
            alibi_slopes is not None
            or logits_soft_cap
            or attn_type != "decoder"
            or kv_sharing_target_layer_name
            or extra
        ):
            raise UnsupportedError("KV4 knows causal attention of decoders alone", "leave --kv-cache-dtype out")
        if sliding_window is not None and not blocks_can_grow():
            raise UnsupportedError(
                "this vLLM gives 4-bit blocks of layers with a sliding window another size than it says",
                "leave --kv-cache-dtype out, or use vLLM 0.32",
            )
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window = sliding_window

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KV4Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of this step's tokens, then attend.

        query [T, Hq, D], key and value [T, Hkv, D] after RoPE; kv_cache: bytes of the blocks, one after the other;
        output [T, Hq, D] is written and returned.
        """
        if attn_metadata is None:  # vLLM measures memory with a step that has no cache
            return output.zero_()
        step, count = attn_metadata, attn_metadata.num_actual_tokens
        pages = kv_cache.view(torch.uint8).view(-1, step.layout.num_kv_heads, step.layout.head_bytes)
        qkv = torch.cat([query[:count], key[:count], value[:count]], 1)
        rotated = kv_rope_write(
            qkv, step.cos, step.sin, pages, step.slots, step.layout, step.sink_slots,
            getattr(layer, "k_mean", None), layer.kv4_hadamard,
        )  # fmt: skip
        attended = kv_attention(rotated, pages, step.batch, step.layout, self.scale, self.window)
        output[:count] = attended.view(count, *output.shape[1:]).to(output.dtype)
        return output


class KV4Backend(AttentionBackend):
    """Attention through KV4 pages; nothing but `int4_per_token_head` and decoders."""

    forward_includes_kv_cache_update: bool = True
    has_sinks: ClassVar[bool] = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [KV4_DTYPE]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KV4Impl]:
        return KV4Impl

    @staticmethod
    def get_builder_cls() -> type[KV4Builder]:
        return KV4Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return blocks_can_grow()

    # How a block is shaped: 0.32 asks for a layout and the bytes of a token, 0.26 for a shape and a required layout.

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        return head_major_layouts()

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        token = spec.head_size + 8
        if cls.has_sinks:
            block = spec.block_size if spec.block_size >= PAGE_TOKENS else USUAL_BLOCK  # 1: vLLM asks for a rate
            if token * PAGE_TOKENS % block:
                raise UnsupportedError(f"KV4 with sinks has no blocks of {block} tokens", f"--block-size {USUAL_BLOCK}")
            token += token * PAGE_TOKENS // block
        return replace(spec, state_content_bytes=token)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, head_size + 8

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"


class KV4SinkBackend(KV4Backend):
    """As KV4Backend, with a page for sinks in every block."""

    has_sinks: ClassVar[bool] = True

    @staticmethod
    def get_builder_cls() -> type[KV4Builder]:
        return KV4SinkBuilder
