"""A GGUF file as a source: llama.cpp's names and order turned back into Hugging Face's, dequantised as it is asked for.

Quantised GGUF weights are whatever the file holds, read as float32: the "source" of a comparison is then that
dequantised model, and says so in its identity.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from w4a4.calibrate.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from w4a4.calibrate.gguf_tokenizer import end_token_ids, write_tokenizer
from w4a4.calibrate.source import SourceIdentity, check_tensor_names, checked_finite
from w4a4.configs.architecture import SUPPORTED, SUPPORTED_TEXT, ModelConfig
from w4a4.configs.errors import CheckpointError, NotFoundError, UnsupportedError
from w4a4.configs.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_ELEMENTS: Final = 2**20  # dequantised at a time
_HF_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN: Final = re.compile(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)")
_PART_PATTERN: Final = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


class GGUFSource:
    """See `calibrate.source.Source`. A file split in parts is opened by the name of its first."""

    def __init__(self, path: Path, *, name: str) -> None:
        self._path = path
        self._name = name
        header = _read_parts(path)
        self._metadata = header.metadata
        self.hf_config: dict[str, Any] = hf_config_of(header, path.name)
        self.config: ModelConfig = ModelConfig.from_hf(self.hf_config)
        self._tensors = {
            _hf_name(stored_name, path.name): stored
            for stored_name, stored in header.tensors.items()
            if not stored_name.startswith("rope_freqs")
        }
        check_tensor_names(
            self.config, {tensor_name: stored.shape for tensor_name, stored in self._tensors.items()}, path.name
        )
        self._permuted = self.config.architecture in ("llama", "mistral")
        self._side_folder: Path | None = None

    @cached_property
    def identity(self) -> SourceIdentity:
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return SourceIdentity(self._name, "gguf", self._path, None, digest)

    @property
    def side_files(self) -> tuple[Path, ...]:
        """Tokenizer files and `generation_config.json`, written to a folder that lives as long as this object."""
        if self._side_folder is None:
            folder = Path(tempfile.mkdtemp(prefix="w4a4-gguf-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            write_tokenizer(self._metadata, self._path, folder)
            self._side_folder = folder
        return tuple(sorted(self._side_folder.iterdir()))

    def names(self) -> frozenset[str]:
        return frozenset(self.config.tensor_shapes())

    def tensor(self, name: str) -> Tensor:
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        stored = self._tensors.get(name)
        if stored is None or name not in self.names():
            raise CheckpointError(f"{self._path.name}: the model has no tensor {name}")
        values = torch.from_numpy(_dequantise(stored, name))
        if self._permuted and (heads := self._rotated_heads(name)):
            values = _unpermute(values, heads)
        return checked_finite(values, name, self._path.name)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.side_files[0].parent, self.config.vocab_size)

    def _rotated_heads(self, name: str) -> int:
        """Heads whose rows llama.cpp stores in another order: those of q and k. 0 for every other tensor."""
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0


def hf_config_of(header: GGUFHeader, name: str) -> dict[str, Any]:
    """`config.json` as Hugging Face would have it, from GGUF metadata.

    Raises:
        UnsupportedError: another architecture, experts, or rotary embeddings that cannot be expressed.
        CheckpointError: a key that is needed is missing.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED:
        raise UnsupportedError(
            f"{name}: architecture {architecture!r} is not supported", f"supported: {SUPPORTED_TEXT}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{name}: no {architecture}.{key} in the metadata")
        return found

    if value("expert_count", 0):
        raise UnsupportedError(f"{name} is a mixture of experts", f"supported: {SUPPORTED_TEXT}")
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{name}: no tensor token_embd.weight")
    hidden_size, num_heads = value("embedding_length"), value("attention.head_count")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise UnsupportedError(f"{name}: head counts that differ between layers", f"supported: {SUPPORTED_TEXT}")
    head_dim = value("attention.key_length", value("rope.dimension_count", hidden_size // num_heads))
    if value("attention.value_length", head_dim) != head_dim or value("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(
            f"{name}: heads whose keys, values and rotary parts differ in width", f"supported: {SUPPORTED_TEXT}"
        )
    config: dict[str, Any] = {
        "architectures": [_HF_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": float(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(header, name, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "use_cache": True,
        "dtype": "bfloat16",
    }
    attention_bias = "blk.0.attn_output.bias" in header.tensors
    if architecture == "llama":
        config |= {"attention_bias": attention_bias, "mlp_bias": "blk.0.ffn_down.bias" in header.tensors}
    elif architecture == "qwen3":
        config["attention_bias"] = attention_bias
    elif architecture == "mistral":
        config["sliding_window"] = metadata.get("mistral.attention.sliding_window")
    if architecture.startswith("qwen"):
        config["use_sliding_window"] = False
    ends = end_token_ids(metadata)
    for key, token in (
        ("bos_token_id", metadata.get("tokenizer.ggml.bos_token_id")),
        ("eos_token_id", ends[0] if ends else None),
        ("pad_token_id", metadata.get("tokenizer.ggml.padding_token_id")),
    ):
        if token is not None:
            config[key] = token
    return config


def _rope_scaling(header: GGUFHeader, name: str, architecture: str, head_dim: int) -> dict[str, Any] | None:
    metadata = header.metadata
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", metadata.get(f"{architecture}.rope.scale_linear"))
    if "rope_freqs.weight" in header.tensors:
        factors = _dequantise(header.tensors["rope_freqs.weight"], "rope_freqs.weight").reshape(-1)
        return _llama3_scaling(factors, float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)), head_dim, name)
    if kind == "none" and factor in (None, 1.0):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": float(factor or 1.0)}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": float(factor or 1.0)}
        original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
        return scaling | ({"original_max_position_embeddings": original} if original else {})
    raise UnsupportedError(f"{name}: rotary embeddings scaled by {kind!r} are not supported: linear, yarn, llama3 are")


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int, name: str) -> dict[str, Any]:
    """Llama 3's parameters from the table of factors that GGUF keeps instead; refused when no such table fits.

    Llama 3.1 to 3.3: wavelengths beyond 8192 positions are stretched by a factor, those under 8192 / 4 are kept.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedError(
            f"{name}: its table of rotary factors (rope_freqs.weight) is not Llama 3's",
            "name the model's folder instead: its config.json says how positions are scaled",
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _hf_name(name: str, file: str) -> str:
    match = _LAYER_PATTERN.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    raise CheckpointError(f"{file}: tensor {name} is not part of a supported model", f"supported: {SUPPORTED_TEXT}")


def _read_parts(path: Path) -> GGUFHeader:
    """The header of `path`, joined with those of its further parts (`-00002-of-00003.gguf`) when it was split."""
    header = read_gguf_header(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    match = _PART_PATTERN.fullmatch(path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise NotFoundError(
            f"{path.name} is one of {count} parts", "name the first part, the one that ends in -00001-of-*.gguf"
        )
    tensors: dict[str, GGUFTensor] = dict(header.tensors)
    for number in range(2, count + 1):
        part = path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        if not part.is_file():
            raise NotFoundError(
                f"{path.name} has {count} parts and {part.name} is missing", "fetch it beside the first"
            )
        tensors |= read_gguf_header(part).tensors
    return GGUFHeader(header.metadata, tensors)


def _dequantise(stored: GGUFTensor, name: str) -> np.ndarray:
    """float32 of the tensor's shape, a few rows at a time so that little more than the result is ever held."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    width, rows = stored.shape[-1], int(np.prod(stored.shape[:-1], dtype=np.int64))
    out = np.empty((rows, width), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // width)
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.begin)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            raw = file.read(count * stored.row_bytes)
            if len(raw) != count * stored.row_bytes:
                raise CheckpointError(f"{stored.file.name} is truncated in tensor {name}", "fetch the file again")
            block = np.frombuffer(raw, dtype=np.uint8).reshape(count, stored.row_bytes)
            try:
                values = (
                    block.view(np.float32)
                    if stored.kind is GGMLQuantizationType.F32
                    else dequantize(block, stored.kind)
                )
            except NotImplementedError as error:
                raise UnsupportedError(f"{stored.file.name}: tensor {name} of type {stored.kind.name}") from error
            out[begin : begin + count] = values
    return out.reshape(stored.shape)


def _unpermute(values: Tensor, heads: int) -> Tensor:
    """Rows back from llama.cpp's interleaved rotary order to Hugging Face's half-split one, head by head.

    Stored row 2 i + j of a head is Hugging Face's row j · head_dim / 2 + i (j = 0, 1).
    """
    per_head = values.reshape(heads, -1, 2, *values.shape[1:])
    return per_head.transpose(1, 2).reshape(values.shape)
