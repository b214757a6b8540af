"""`w4a4 export --format fake-quant`: the rounded weights as an ordinary float model, for any evaluator.

The function is the checkpoint's with activations and KV cache unquantised. Columns go back to the order and basis of
the input (the permutation and the Hadamard before down_proj are undone), a mean off the keys and the Hadamard on q and
k cancel in q·k and are dropped; what is folded (norm gains, residual basis, scalings, values) cancels as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.configs.errors import UnsupportedError
from w4a4.export.checkpoint import PackedCheckpoint, PackedLinear
from w4a4.export.plain_folder import TensorParts, write_plain_folder
from w4a4.kernels.reference import dense_weight


def export_fake_quant(checkpoint: PackedCheckpoint, output: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the float model of `checkpoint` to `output`, weights in `dtype`.

    Raises:
        UnsupportedError: biases that no plain architecture has room for.
        UsageError, ResourceError: see `write_plain_folder`.
    """
    config = plain_config(checkpoint)
    config["dtype"] = str(dtype).removeprefix("torch.")
    card = (
        f"# {checkpoint.path.resolve().name}, dequantised\n\n"
        f"The 4-bit weights of a w4a4 checkpoint (recipe {checkpoint.quantization['recipe']}) as {config['dtype']} "
        "numbers: an ordinary model for evaluation. It computes what the checkpoint computes with activations and KV "
        "cache in 16 bits, and is no smaller or faster than any other float model.\n"
    )
    return write_plain_folder(checkpoint, output, config, float_tensors(checkpoint, config, dtype), card)


def input_weight(linear: PackedLinear) -> Tensor:
    """The weight float32 [N, K] that multiplies the linear's input as it comes: y = x Wᵀ + b."""
    return dense_weight(linear.weights, linear.weight_scales, linear.layout, linear.perm)


def plain_config(checkpoint: PackedCheckpoint) -> dict[str, Any]:
    """config.json of the float model. Where the checkpoint has biases that its architecture does not know (a mean
    taken off the values leaves one on o_proj) it becomes a Llama with biases, which computes the same.

    Raises:
        UnsupportedError: such biases, and sliding windows that a Llama does not have.
    """
    config = {key: value for key, value in checkpoint.hf_config.items() if key not in ("quantization_config", "dtype")}
    config.pop("torch_dtype", None)
    needs = _foreign_biases(checkpoint)
    if not needs:
        return config
    model = checkpoint.config
    windows = [window for window in model.sliding_windows if window is not None]
    if windows and min(windows) < model.max_position_embeddings:
        raise UnsupportedError(
            f"the mean taken off the values left biases on {', '.join(sorted(needs))}, and no plain architecture has "
            f"those together with this model's sliding window of {min(windows)}",
            "quantise with --set kv_mean=false to export it",
        )
    if model.qk_norm:  # Qwen3 knows biases on all of attention
        config["attention_bias"] = True
        return config
    for key in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": model.mlp_bias,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def float_tensors(checkpoint: PackedCheckpoint, config: Mapping[str, Any], dtype: torch.dtype) -> TensorParts:
    """Every tensor of the float model of that config, a module at a time."""
    packed = set(checkpoint.linear_names)
    has_attention_bias = bool(config.get("attention_bias", False))
    for name in sorted(checkpoint.names()):
        if not name.endswith(".k_mean") and name.rpartition(".")[0] not in packed:
            yield {name: checkpoint.tensor(name).to(dtype)}
    for prefix in checkpoint.linear_names:
        linear = checkpoint.linear(prefix)
        part = {f"{prefix}.weight": input_weight(linear).to(dtype)}
        if linear.bias is not None:
            part[f"{prefix}.bias"] = linear.bias.to(dtype)
        elif has_attention_bias and ".self_attn." in prefix:
            part[f"{prefix}.bias"] = torch.zeros(linear.layout.out_features, dtype=dtype)
        yield part


def _foreign_biases(checkpoint: PackedCheckpoint) -> set[str]:
    """Short names of linears that have a bias though the architecture knows none."""
    names = checkpoint.names()
    return {
        name.rpartition(".")[2]
        for prefix in checkpoint.linear_names
        for name in [prefix.split(".", 3)[3]]
        if f"{prefix}.bias" in names and not checkpoint.config.has_bias(name)
    }
