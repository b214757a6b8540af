"""A packed checkpoint of a random model with two small layers: what the tests of this folder write, break and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.export.packed_linear import PackedLinear
from w4a4.export.writer import CheckpointWriter
from w4a4.kernels.layout import LinearLayout, Segment

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "w4a4",
    "format_version": "1.0",
    "required_features": [],
    "producer": {"name": "w4a4", "version": "0"},
    "recipe": "dual",
    "block_size": 128,
    "weights": {"bits": 4, "group_size": 0, "symmetric": True},
    "activations": {"bits": 4, "symmetric": True, "default_act": "map"},
    "kv_cache": {"bits": 4, "qk_hadamard": True, "k_mean": True, "sink_tokens": 4},
    "transforms": {"down_hadamard": 32},
    "permutation": {"tp_max": 1},
    "modules_to_not_convert": ["lm_head"],
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
RUN = {"source": "tiny", "seed": 0}
TOKENIZER_FILES = tuple(sorted(Path(__file__).with_name("tiny_tokenizer").iterdir()))
"""One that knows the model's 40 tokens."""


def random_linear(layout: LinearLayout, seed: int, has_perm: bool = True, has_bias: bool = False) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for segment in layout.segments:
        shape = (layout.out_features, segment.width)
        if segment.weight_bits == 16:
            weights.append(torch.randn(shape, generator=generator).bfloat16())
        else:
            low, high = {4: (-8, 8), 8: (-127, 128)}[segment.weight_bits]
            weights.append(torch.randint(low, high, shape, generator=generator).to(torch.int8))
    return PackedLinear(
        layout,
        tuple(weights),
        torch.rand(layout.out_features, layout.num_scales, generator=generator) + 0.01,
        torch.randperm(layout.in_features, generator=generator).int() if has_perm else None,
        torch.randn(layout.out_features, generator=generator).bfloat16() if has_bias else None,
    )


def layer_of(index: int) -> tuple[dict[str, PackedLinear], dict[str, Tensor]]:
    """Layer `index`: 48 channels at 4 bits and 16 at 8 in front of q, k, v, gate, up; all kinds of tensors occur."""
    prefix = f"model.layers.{index}."
    mixed, plain = (Segment(48, 4, 4), Segment(16, 8, 8)), (Segment(64, 4, 4),)
    linears: dict[str, PackedLinear] = {}
    for number, (name, (out_features, in_features)) in enumerate(SHAPES.items()):
        if name == "mlp.down_proj":
            layout = LinearLayout(out_features, (Segment(in_features, 4, 4),), clip=(0.875, 2.5), hadamard=32)
        else:
            layout = LinearLayout(out_features, plain if name == "self_attn.o_proj" else mixed)
        is_first = name in ("self_attn.q_proj", "mlp.gate_proj")
        linear = random_linear(layout, index * 100 + number, name != "self_attn.o_proj", name == "self_attn.o_proj")
        if not is_first and linear.perm is not None and name != "mlp.down_proj":
            shared = "self_attn.q_proj" if name.startswith("self_attn") else "mlp.gate_proj"
            perm = linears[prefix + shared].perm
            linear = PackedLinear(layout, linear.weights, linear.weight_scales, perm, linear.bias)
        linears[prefix + name] = linear
    generator = torch.Generator().manual_seed(index)
    tensors = {
        prefix + "input_layernorm.weight": torch.randn(64, generator=generator).bfloat16(),
        prefix + "post_attention_layernorm.weight": torch.randn(64, generator=generator).bfloat16(),
        prefix + "self_attn.k_mean": torch.randn(2, 16, generator=generator),
    }
    return linears, tensors


def rest() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        "model.embed_tokens.weight": torch.randn(40, 64, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(64, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(40, 64, generator=generator).half(),
    }


def write(output: Path, side_files: tuple[Path, ...] = TOKENIZER_FILES, max_shard_bytes: int = 30_000) -> list[int]:
    """The whole run, resuming what is there; each layer checks the state it continues. Returns the layers written."""
    written = []
    with CheckpointWriter(output, RUN) as writer:
        for index in range(writer.open(), 2):
            state = writer.load_state("hidden")
            assert state is None if index == 0 else state is not None and state["x"].tolist() == [float(index)]
            writer.save_state("hidden", {"x": torch.tensor([index + 1.0])})
            writer.write_layer(index, *layer_of(index))
            written.append(index)
        writer.write_rest(rest())
        quality = {"perplexity": 12.5}
        extras = {"source": {"name": "tiny"}, "quality": quality}
        writer.finish(HF_CONFIG, QUANTIZATION, "name: dual\n", side_files, extras, "# tiny\n", max_shard_bytes)
    return written


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
