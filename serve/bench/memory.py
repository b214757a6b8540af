"""What a model occupies and what is left: weights, KV per token, and how many tokens and sequences fit."""

from __future__ import annotations

from typing import Any

import torch

from w4a4.serve.model import CausalLM

UTILIZATION = 0.9
"""Share of a GPU's memory that weights, work space and KV cache may take together."""
WORKSPACE_BYTES = 4 << 30
"""Set aside on a GPU for activations of a prefill step, logits and kernels' work space. Measured peaks are in the
records."""
CPU_KV_BYTES = 1 << 30


def linear_bytes(model: CausalLM) -> int:
    """Bytes of the packed linears as one pass over them reads them."""
    return sum(_tensor_bytes(linear) for linear in model.linears().values())


def head_bytes(model: CausalLM) -> int:
    return model.head.numel() * model.head.element_size()


def model_bytes(model: CausalLM) -> int:
    """Weights in memory: linears, head, and the embedding where it is not the head."""
    embedding = 0 if model.embedding is model.head else model.embedding.numel() * model.embedding.element_size()
    return linear_bytes(model) + head_bytes(model) + embedding


def kv_token_bytes(model: CausalLM) -> float:
    """Bytes of one token's K and V in all layers, sinks left out."""
    layout = model.kv_layout()
    return layout.page_bytes / layout.page_size * model.config.num_layers


def kv_bytes_available(model: CausalLM, utilization: float = UTILIZATION) -> int:
    """Bytes for KV pages beside the model."""
    if model.device.type != "cuda":
        return CPU_KV_BYTES
    total = torch.cuda.get_device_properties(model.device).total_memory
    return int(total * utilization) - model_bytes(model) - WORKSPACE_BYTES


def kv_tokens(model: CausalLM) -> int:
    """Tokens whose K and V fit."""
    return int(kv_bytes_available(model) / kv_token_bytes(model))


def largest_batch(model: CausalLM, max_tokens: int) -> int:
    """Sequences of `max_tokens` tokens whose K and V fit, sinks included; at least 1, a multiple of 8 from 8 on and of
    128 from 512 on, where a product with another number of rows has a tile that is mostly empty.
    """
    layout = model.kv_layout()
    pages = layout.pages_for(max_tokens)
    fits = kv_bytes_available(model) // (pages * layout.page_bytes * model.config.num_layers)
    multiple = 128 if fits >= 512 else 8 if fits >= 8 else 1
    return max(1, fits // multiple * multiple)


def _tensor_bytes(linear: Any) -> int:
    weights = linear.weights if hasattr(linear, "weights") else (linear.weight,)
    return sum(weight.numel() * weight.element_size() for weight in weights)


def memory_split(model: CausalLM) -> dict[str, float]:
    """GiB of linears, embedding and head, and on a GPU what KV pages and work space may take."""
    split = {
        "linears": linear_bytes(model) / 2**30,
        "embedding and head": (model_bytes(model) - linear_bytes(model)) / 2**30,
    }
    if model.device.type == "cuda":
        split |= {"KV pages": kv_bytes_available(model) / 2**30, "work space": WORKSPACE_BYTES / 2**30}
    return {name: round(gib, 3) for name, gib in split.items()}
