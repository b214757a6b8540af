"""What a model looks like: the shape of a decoder-only LLaMA-type network, read from a Hugging Face `config.json`.

All that a reader of weights, a decoder or a checkpoint must know about a model is here, and nothing about its numbers.
Standard library only: `w4a4 --help` and the command line's early refusals import this without PyTorch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from w4a4.configs.errors import CheckpointError, UnsupportedError

SUPPORTED: Final = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_TEXT: Final = (
    "Llama 1/2/3 (and models of its shape), Mistral, Qwen2/2.5 and Qwen3, dense, text only, float weights"
)
ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn")

HEAD_DIMS: Final = (64, 128, 256)  # of KV pages
CHANNEL_MULTIPLE: Final = 64  # of every linear's input width: the narrowest block of one precision
MAX_CHANNELS: Final = 32768  # that the GPU's quantise kernels take

_HINT: Final = f"supported: {SUPPORTED_TEXT}"
_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
_MODALITY_KEYS: Final = ("vision_config", "text_config", "audio_config", "vision_tower", "mm_vision_tower")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one model. Sizes count elements; `rope_theta` is the base of the rotary angles.

    `rope_scaling` is None for plain rotary embeddings, else Hugging Face's parameters with `rope_type` one of
    `ROPE_TYPES`. `sliding_windows` has one entry per layer: the number of positions a query sees, itself included, or
    None for all of them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The shape that a `config.json` declares, as transformers 4 or 5 writes it.

        Raises:
            UnsupportedError: another architecture, mixture of experts, several modalities, or quantised already
                (our own `quant_method` "w4a4" passes: a packed checkpoint has the shape of its source).
            CheckpointError: a field that is needed is missing or makes no sense.
        """
        refuse_unsupported(config)
        architecture = str(config["model_type"])
        hidden_size = _count(config, "hidden_size")
        num_layers = _count(config, "num_hidden_layers")
        num_heads = _count(config, "num_attention_heads")
        num_kv_heads = _count(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
            )
        head_dim = _count(config, "head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
        max_positions = _count(config, "max_position_embeddings", 2048)
        attention_bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
        theta, scaling = _rope(config, max_positions)
        return cls(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=max_positions,
            sliding_windows=_sliding_windows(config, architecture, num_layers),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
        )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The linears of one decoder layer: name under the layer -> (N outputs, K inputs), in order of use."""
        return {
            "self_attn.q_proj": (self.q_size, self.hidden_size),
            "self_attn.k_proj": (self.kv_size, self.hidden_size),
            "self_attn.v_proj": (self.kv_size, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, self.q_size),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }

    def has_bias(self, linear: str) -> bool:
        """Whether the linear of that name (as in `linear_shapes`) adds a bias."""
        if linear.startswith("mlp."):
            return self.mlp_bias
        return self.o_bias if linear == "self_attn.o_proj" else self.qkv_bias

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every float tensor of the model by its Hugging Face name. A tied `lm_head.weight` is left out."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = (self.hidden_size,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (self.hidden_size,)
            for name, (outputs, inputs) in self.linear_shapes().items():
                shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
                if self.has_bias(name):
                    shapes[f"{prefix}{name}.bias"] = (outputs,)
            if self.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Elements of every tensor, tied ones counted once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError when a `config.json` names a model that this project does not run; see `from_hf`."""
    model_type = config.get("model_type")
    for key in _MODALITY_KEYS:
        if config.get(key):
            raise UnsupportedError(f"{model_type} is a multimodal model (config.json has {key!r})", _HINT)
    for key in _EXPERT_KEYS:
        experts = config.get(key)
        if isinstance(experts, int) and experts > 1:
            raise UnsupportedError(f"{model_type} is a mixture of experts ({key} = {experts})", _HINT)
    if model_type not in SUPPORTED:
        raise UnsupportedError(f"architecture {model_type!r} is not supported (model_type in config.json)", _HINT)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"config.json: architectures must be a list, got {str(architectures)[:60]}")
    for name in architectures:
        if not str(name).endswith("ForCausalLM"):
            raise UnsupportedError(f"{name} is not a causal language model", _HINT)
    method = quantization_method(config)
    if method not in (None, "w4a4"):
        raise UnsupportedError(
            f"the model is quantised already (quantization_config: {method})", "name the original with float weights"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"activation {activation!r} is not supported (hidden_act in config.json)", _HINT)


def refuse_unpackable(config: ModelConfig) -> None:
    """Raise UnsupportedError when a supported architecture has a size that a packed model cannot run with."""
    hint = (
        f"packed models need a head_dim of {', '.join(map(str, HEAD_DIMS))} and widths that are multiples of "
        f"{CHANNEL_MULTIPLE} up to {MAX_CHANNELS}"
    )
    if config.head_dim not in HEAD_DIMS:
        raise UnsupportedError(f"head_dim {config.head_dim} is not supported", hint)
    for name, (_, width) in config.linear_shapes().items():
        if width % CHANNEL_MULTIPLE or width > MAX_CHANNELS:
            raise UnsupportedError(f"{name} has an input width of {width}, which is not supported", hint)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """How a `config.json` says its weights are quantised: "gptq", "awq", "w4a4", ...; None for float weights."""
    for key in ("quantization_config", "compression_config"):
        declared = config.get(key)
        if declared is not None:
            return str(declared.get("quant_method", "unknown")) if isinstance(declared, Mapping) else str(declared)
    return None


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}", "the model's folder is incomplete: fetch it again")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json: {name} must be a positive number, got {str(value)[:60]}")
    return float(value)


def _rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling parameters): `rope_parameters` of transformers 5, else `rope_theta` and `rope_scaling`."""
    declared = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(declared, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be a mapping, got {declared!r}")
    parameters = dict(declared)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError("rotary embeddings that differ between kinds of layers are not supported", _HINT)
    theta = _positive(parameters.pop("rope_theta", config.get("rope_theta") or 10000.0), "rope_theta")
    rope_type = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedError(f"rotary embeddings of a part of each head are not supported (factor {partial})", _HINT)
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            f"rotary embeddings of type {rope_type!r} are not supported", f"supported: {', '.join(ROPE_TYPES)}"
        )
    if rope_type == "default":
        return theta, None
    _positive(parameters.get("factor"), "rope factor")
    if rope_type in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", max_positions)
    if rope_type == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            _positive(parameters.get(key), f"rope {key}")
    return theta, {"rope_type": rope_type, **parameters}


def _sliding_windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Positions each layer attends to. Defaults for absent keys are transformers' own for that architecture."""
    if architecture == "llama":
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)
    if architecture != "mistral" and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * num_layers
    window = _count({"sliding_window": window}, "sliding_window")
    if architecture == "mistral":
        return (window,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(layer_types)} entries, expected {num_layers}")
    kinds: dict[str, int | None] = {"sliding_attention": window, "full_attention": None}
    for kind in layer_types:
        if kind not in kinds:
            raise UnsupportedError(f"layers of type {kind!r} are not supported", f"supported: {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in layer_types)
