"""Tiny random models of every supported architecture, as Hugging Face folders, for tests of all rooms."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama-tied-biased": {
        "model_type": "llama",
        **SIZES,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 32,
    },
    "llama3": {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen2-sliding": {
        "model_type": "qwen2",
        **SIZES,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32},
}

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model() -> ModelFolder:
    """`make_model(parent, "qwen3", shard_size="50KB", tokenizer=True, **changes)` -> folder of a random float32 model.

    Norm gains and biases are random as well, so that a forgotten one shows.
    """

    def make(parent: Path, kind: str, *, shard_size: str = "5GB", tokenizer: bool = False, **changes: Any) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        values = {**TINY_CONFIGS[kind], **changes}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
        folder = parent / f"model-{len(list(parent.iterdir()))}"
        model.save_pretrained(folder, max_shard_size=shard_size)
        if tokenizer:
            write_tiny_tokenizer(folder, model.config.vocab_size)
        return folder

    return make


@pytest.fixture
def model_folder(make_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    """`make_model` in the test's own folder: `model_folder("qwen3", **changes)`."""
    return partial(make_model, tmp_path)


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: 256 bytes, then `<s>`, `</s>`, and unused fillers up to `vocab_size`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<s>", "</s>", *(f"<unused{index}>" for index in range(vocab_size - 258))]
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 256]}))
