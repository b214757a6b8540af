"""vLLM's view of `quantization_config`: which method each of its layers gets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from w4a4.configs.errors import UnsupportedError
from w4a4.export.checkpoint import PackedCheckpoint, open_checkpoint
from w4a4.serve.integrations.vllm.kv4_backend import KV4Method, use_kv4_backend
from w4a4.serve.integrations.vllm.linear_method import BIAS, W4A4LinearMethod
from w4a4.serve.integrations.vllm.ranks import refuse_uncuttable
from w4a4.serve.integrations.vllm.settings import PluginSettings
from w4a4.serve.integrations.vllm.versions import KV4_DTYPE

NAME = "w4a4"


class W4A4Config(QuantizationConfig):
    """Every q, k, v, o, gate, up and down is packed; embeddings and lm_head are vLLM's own."""

    def __init__(self, quantization: dict[str, Any]) -> None:
        super().__init__()
        self.quantization = quantization
        self._checkpoint: PackedCheckpoint | None = None

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # it stands in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A4Config:
        return cls(config)

    @staticmethod
    def get_cache_scale_mapper() -> Any:
        """Renames tensors on their way to parameters: biases to ours, k_mean to the attention layer."""
        mapper = QuantizationConfig.get_cache_scale_mapper()
        own = type(mapper)(
            orig_to_new_regex={
                re.compile(r"_proj\.bias$"): rf"_proj.{BIAS}",
                re.compile(r"\.self_attn\.k_mean$"): ".self_attn.attn.k_mean",
            }
        )
        return mapper | own

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            parent, _, name = prefix.rpartition(".")
            members = [f"{parent}.{member}" for member in self.packed_modules_mapping.get(name, [name])]
            checkpoint = self.checkpoint()
            if members[0] not in checkpoint.linear_names:
                raise UnsupportedError(f"{prefix} is no packed linear of {checkpoint.path}", "w4a4 inspect DIR")
            return W4A4LinearMethod(checkpoint, members, _settings())
        if isinstance(layer, Attention):
            kv = self.quantization["kv_cache"]
            return KV4Method(self, bool(kv["k_mean"]), bool(kv["qk_hadamard"]), int(kv["sink_tokens"]))
        return None

    def checkpoint(self) -> PackedCheckpoint:
        """The checkpoint of the model that vLLM is building, opened and checked once in a process.

        Raises:
            UnsupportedError: linears that cannot be cut into this many ranks, all named.
        """
        if self._checkpoint is None:
            vllm = get_current_vllm_config()
            self._checkpoint = open_checkpoint(_folder(vllm.model_config.model, vllm.model_config.revision))
            refuse_uncuttable(self._checkpoint, get_tensor_model_parallel_world_size(), _settings().per_rank_scales)
            if vllm.cache_config.cache_dtype == KV4_DTYPE:
                use_kv4_backend(int(self.quantization["kv_cache"]["sink_tokens"]))
        return self._checkpoint

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_checkpoint": None}  # memory-mapped files do not travel between processes


def _settings() -> PluginSettings:
    return PluginSettings.of(get_current_vllm_config().additional_config)


def _folder(model: str, revision: str | None) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, ignore_patterns=["*.bin", "*.pt", "*.pth"]))
