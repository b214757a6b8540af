"""Packed checkpoints in transformers: import this module, then `AutoModelForCausalLM.from_pretrained(DIR)` runs them.

    import w4a4.serve.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained("smollm2-w4a4")  # on a GPU: device_map="cuda"

The import registers quantisation method "w4a4" and an attention function of that name. Linears become
`PackedLinearModule`, attention rounds keys and values as the KV4 cache does (`cached_attention`), everything else is
transformers' own. On a CPU the model runs in float32 and gives the logits of `serve/model.py`; on a GPU in bf16. It is
for evaluation and for tools that expect transformers: `w4a4 serve` is several times faster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from w4a4.configs.errors import CheckpointError, UnsupportedError
from w4a4.export.checkpoint import PackedCheckpoint, open_checkpoint
from w4a4.kernels.layout import ActMode
from w4a4.kernels.ops import UnsupportedDeviceError
from w4a4.serve.integrations.cached_attention import CacheRules, attend_cached
from w4a4.serve.integrations.packed_module import PackedLinearModule

NAME = "w4a4"


def configure(model: nn.Module, act: ActMode | None = None, kv_bits: int | None = None) -> None:
    """Run a loaded model with other activations ("map", "a8", "a16") or another cache (4 or 16 bits); None: unchanged.

    Raises:
        ValueError: kv_bits is neither.
    """
    if kv_bits not in (None, 4, 16):
        raise ValueError(f"kv_bits must be 4 or 16, got {kv_bits}")
    for module in model.modules():
        if isinstance(module, PackedLinearModule) and act is not None:
            module.act = act
            module.prepare()
        rules = getattr(module, "cache_rules", None)
        if isinstance(rules, CacheRules) and kv_bits is not None:
            module.cache_rules = CacheRules(kv_bits, rules.use_qk_hadamard, rules.num_sinks)  # type: ignore[assignment]


@register_quantization_config(NAME)
class W4A4Config(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a packed checkpoint, section by section as docs/format.md has it."""

    def __init__(self, **sections: Any) -> None:
        self.__dict__.update(sections)
        self.quant_method = NAME


@register_quantizer(NAME)
class W4A4Quantizer(HfQuantizer):  # type: ignore[misc]
    """Builds the packed model before transformers loads tensors into it, and checks it afterwards."""

    requires_calibration = True  # a float model is packed by `w4a4 quantize`, never here

    def __init__(self, quantization_config: W4A4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._is_on_gpu = False
        self._num_packed = 0

    def validate_environment(self, *_args: Any, device_map: Any = None, **_kwargs: Any) -> None:
        places = {str(place) for place in (device_map.values() if isinstance(device_map, dict) else [device_map])}
        if "disk" in places:
            raise UnsupportedError("packed linears cannot be offloaded to disk", "leave 'disk' out of device_map")
        is_cpu = places <= {"None", "cpu"} or (places == {"auto"} and not torch.cuda.is_available())
        self._is_on_gpu = not is_cpu

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that our kernels take activations in, whatever was asked for."""
        return torch.bfloat16 if self._is_on_gpu else torch.float32

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_kwargs: Any
    ) -> None:
        """Put packed modules in place of linears, all on the meta device.

        Raises:
            UnsupportedError: weights that do not come from a folder.
            CheckpointError: anything in the folder that does not fit.
        """
        if not checkpoint_files:
            raise UnsupportedError(
                "a packed checkpoint is loaded from its folder", "from_pretrained(DIR), no state_dict"
            )
        checkpoint = open_checkpoint(Path(checkpoint_files[0]).parent)
        for prefix in checkpoint.linear_names:
            parent, _, name = prefix.rpartition(".")
            setattr(model.get_submodule(parent), name, PackedLinearModule(checkpoint, prefix))
        self._num_packed = len(checkpoint.linear_names)
        self._attach_cache_rules(model, checkpoint)
        _check_names(model, checkpoint)
        model.set_attn_implementation(NAME)  # type: ignore[operator]

    def _attach_cache_rules(self, model: nn.Module, checkpoint: PackedCheckpoint) -> None:
        kv = checkpoint.quantization["kv_cache"]
        rules = CacheRules(int(kv["bits"]), bool(kv["qk_hadamard"]), int(kv["sink_tokens"]))
        for layer in range(checkpoint.config.num_layers):
            prefix = f"model.layers.{layer}.self_attn"
            attention = model.get_submodule(prefix)
            attention.cache_rules = rules  # type: ignore[assignment]
            if kv["k_mean"]:
                mean = checkpoint.tensor(f"{prefix}.k_mean")
                attention.register_buffer("k_mean", torch.empty_like(mean, device="meta"))

    def _process_model_after_weight_loading(self, model: nn.Module, **_kwargs: Any) -> nn.Module:
        """Raises CheckpointError unless every packed module is there, filled and sound."""
        packed = [module for module in model.modules() if isinstance(module, PackedLinearModule)]
        empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
        if not packed or len(packed) != self._num_packed or empty:
            raise CheckpointError(
                f"{len(packed)} of {self._num_packed} packed modules were loaded, and {len(empty)} tensors are missing"
                + (f", {empty[0]} first" if empty else ""),
                "w4a4 verify DIR",
            )
        try:
            for module in packed:
                module.prepare()
        except UnsupportedDeviceError as error:
            raise UnsupportedError(str(error), "device_map='cpu'") from error
        return model

    def is_serializable(self, **_kwargs: Any) -> bool:
        """No: a checkpoint is copied as a folder, manifest and all."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _check_names(model: nn.Module, checkpoint: PackedCheckpoint) -> None:
    """Raise CheckpointError unless checkpoint and model name the same tensors, but for a tied head."""
    wanted, found = set(model.state_dict()), set(checkpoint.names())
    if checkpoint.config.tie_word_embeddings:
        wanted.discard("lm_head.weight")
    missing, unused = sorted(wanted - found), sorted(found - wanted)
    if missing or unused:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} tensors of {type(model).__name__} are missing and {len(unused)} have "
            f"no place in it: {', '.join((missing + unused)[:3])}",
            "w4a4 verify DIR",
        )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    position_ids: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: rotated query [B, Hq, T, D] and cache [B, Hkv, n, D] -> [B, T, Hq, D].

    attention_mask [B or 1, 1, T, n]: bool, True where a query sees a key (`attention_mask` below makes it), or added
    to the scores as 0 and large negative numbers.
    """
    rules: CacheRules = module.cache_rules  # type: ignore[assignment]
    mean = getattr(module, "k_mean", None)
    if mean is not None:
        key = key.float() - mean.float().unsqueeze(1)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    if position_ids is None:
        raise ValueError("this attention needs position_ids to tell which tokens are sinks, got None")
    is_sink = key_positions(position_ids, visible) < rules.num_sinks
    return attend_cached(query, key, value, visible, is_sink, scaling, rules), None


def key_positions(position_ids: Tensor, visible: Tensor) -> Tensor:
    """int [B or 1, n]: the position of each cached key, from those of the queries [B or 1, T] and what they see.

    Where keys are those of the queries alone, so are the positions (padding and packed texts included). Else keys end
    with the last query's own token: the last one that it sees, as a static cache goes on after it.
    """
    num_queries, num_keys = visible.shape[-2:]
    if num_queries == num_keys:
        return position_ids
    last_seen = num_keys - 1 - visible[:, 0, -1].flip(-1).int().argmax(-1, keepdim=True)
    return position_ids[:, -1:] - last_seen + torch.arange(num_keys, device=visible.device)


def attention_mask(*args: Any, **kwargs: Any) -> Tensor:
    """transformers' boolean mask, never left out as a shorthand for causal."""
    mask: Tensor = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
