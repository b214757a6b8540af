from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from w4a4.calibrate.source import open_source
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import CheckpointError, NotFoundError, NumericsError, UnsupportedError

ModelFolder = Callable[..., Path]
Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k of a Llama model."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    folder: Path,
    path: Path,
    *,
    architecture: str | None = None,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    change: Change | None = None,
) -> dict[str, torch.Tensor]:
    """Convert a Hugging Face folder the way llama.cpp does; returns what a reader should get, by HF name."""
    config = json.loads((folder / "config.json").read_text())
    shape = ModelConfig.from_hf(config)
    architecture = architecture or shape.architecture
    names = gguf.get_tensor_name_map(
        {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}.get(architecture, gguf.MODEL_ARCH.LLAMA),
        shape.num_layers,
    )
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    for key, value in (metadata or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ](key, value)
    tensors: dict[str, np.ndarray] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = quantisation if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
        expected[name] = torch.from_numpy(rounded.copy())
        stored = rounded
        if architecture in ("llama", "mistral") and ".q_proj." in name:
            stored = llama_cpp_order(rounded, shape.num_heads)
        if architecture in ("llama", "mistral") and ".k_proj." in name:
            stored = llama_cpp_order(rounded, shape.num_kv_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = stored
    if change:
        change(writer, tensors)
    for name, stored in tensors.items():
        kind = quantisation if stored.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(stored), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied-biased", "mistral", "qwen2", "qwen3"])
def test_every_tensor_returns_to_hugging_face_order(
    kind: str, quantisation: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder(kind)
    path = tmp_path / "model.gguf"
    expected = write_gguf(folder, path, quantisation=gguf.GGMLQuantizationType[quantisation])
    source = open_source(str(path))
    assert source.names() == set(expected)
    for name in expected:
        assert torch.equal(source.tensor(name), expected[name]), name
    original = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    ours = source.config
    assert ours.linear_shapes() == original.linear_shapes()
    assert ours.tensor_shapes() == original.tensor_shapes()
    assert ours.rope_theta == original.rope_theta
    assert ours.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    assert (source.identity.kind, source.identity.sha256) == ("gguf", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_model_it_was_converted_from(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(kind)
    write_gguf(folder, tmp_path / "model.gguf")
    source = open_source(str(tmp_path / "model.gguf"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.hf_config), dtype=torch.float32)
    state = {name: source.tensor(name) for name in (*source.names(), "lm_head.weight")}
    model.load_state_dict(state)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(24)[None] * 7 % 300
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, original(tokens).logits, atol=1e-5)


def test_llama_3_rotary_factors_are_recognised(model_folder: ModelFolder, tmp_path: Path) -> None:
    from w4a4.kernels.rope import rope_frequencies

    folder = model_folder("llama3")
    scaling = json.loads((folder / "config.json").read_text())
    shape = ModelConfig.from_hf(scaling)
    plain, _ = rope_frequencies(shape.head_dim, shape.rope_theta, None, 128)
    scaled, _ = rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, 128)
    factors = (plain / scaled).numpy().astype(np.float32)
    assert factors.max() == pytest.approx(8.0)

    def add(_writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = factors

    write_gguf(folder, tmp_path / "model.gguf", change=add)
    assert open_source(str(tmp_path / "model.gguf")).config.rope_scaling == shape.rope_scaling

    def distort(_writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = factors**1.1

    write_gguf(folder, tmp_path / "other.gguf", change=distort)
    with pytest.raises(UnsupportedError, match="rotary factors"):
        open_source(str(tmp_path / "other.gguf"))


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
        ),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_declared_rope_scaling(
    metadata: dict[str, Any], scaling: dict[str, Any] | None, model_folder: ModelFolder, tmp_path: Path
) -> None:
    write_gguf(model_folder("llama"), tmp_path / "model.gguf", metadata=metadata)
    assert open_source(str(tmp_path / "model.gguf")).config.rope_scaling == scaling


def test_parts_are_read_as_one(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"

    def keep(wanted: bool) -> Change:
        def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
            writer.add_uint16("split.count", 2)
            for name in [name for name in tensors if name.startswith("blk.1.") == wanted]:
                del tensors[name]

        return change

    expected = write_gguf(folder, first, change=keep(True))
    write_gguf(folder, second, change=keep(False))
    source = open_source(str(first))
    for name in expected:
        assert torch.equal(source.tensor(name), expected[name]), name
    with pytest.raises(NotFoundError, match="one of 2 parts"):
        open_source(str(second))
    second.unlink()
    with pytest.raises(NotFoundError, match="is missing"):
        open_source(str(first))


def test_tokenizer_and_side_files(model_folder: ModelFolder, tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|endoftext|>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"<unused{index}>" for index in range(300 - len(tokens))],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3] + [5] * (300 - len(tokens)),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": "{% for m in messages %}<{{ m['content'] }}>{% endfor %}",
    }
    write_gguf(model_folder("llama"), tmp_path / "model.gguf", metadata=metadata)
    source = open_source(str(tmp_path / "model.gguf"))
    files = {path.name: path for path in source.side_files}
    assert set(files) == {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads(files["generation_config.json"].read_text()) == {"bos_token_id": 257, "eos_token_id": [258, 257]}
    tokenizer = source.tokenizer()
    ids = tokenizer("abc é<|im_end|>")["input_ids"]
    assert ids[0] == 256
    assert ids[-1] == 258
    assert tokenizer.decode(ids) == "abc é<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    with pytest.raises(UnsupportedError, match="'strange'"):
        write_gguf(model_folder("llama"), tmp_path / "odd.gguf", metadata={**metadata, "tokenizer.ggml.pre": "strange"})
        open_source(str(tmp_path / "odd.gguf")).tokenizer()


def test_digits_and_spaces_are_cut_as_smollm_cuts_them(model_folder: ModelFolder, tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = letters.index("Ġ")
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*letters, "ĠĠ", "12"] + [f"<u{index}>" for index in range(300 - 258)],
        "tokenizer.ggml.token_type": [1] * 258 + [5] * 42,
        "tokenizer.ggml.merges": ["Ġ Ġ", "1 2"],
    }
    write_gguf(model_folder("llama"), tmp_path / "model.gguf", metadata=metadata)
    tokenizer = open_source(str(tmp_path / "model.gguf")).tokenizer()
    # Two spaces before a digit stay together, and digits never merge: both would differ without the digit rule.
    assert tokenizer("  12")["input_ids"] == [256, letters.index("1"), letters.index("2")]
    assert tokenizer("  a")["input_ids"] == [space, space, letters.index("a")]


def test_a_sentencepiece_vocabulary_adds_bos_and_falls_back_to_bytes(model_folder: ModelFolder, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    types = [2, 3, 3] + [6] * 256 + [1] * 5
    padding = 300 - len(pieces)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + [f"<unused{index}>" for index in range(padding)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -0.5, -0.2] + [-100.0] * padding,
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_gguf(model_folder("llama"), tmp_path / "model.gguf", metadata=metadata)
    source = open_source(str(tmp_path / "model.gguf"))
    tokenizer = source.tokenizer()
    ids = tokenizer("ab é")["input_ids"]
    assert ids == [1, pieces.index("▁ab"), pieces.index("▁"), pieces.index("<0xC3>"), pieces.index("<0xA9>")]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "ab é"
    assert tokenizer.eos_token_id == 2
    generation = next(path for path in source.side_files if path.name == "generation_config.json")
    assert json.loads(generation.read_text())["eos_token_id"] == [2]


# Bad input


def test_other_architectures_and_experts_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    write_gguf(folder, tmp_path / "gemma.gguf", architecture="gemma2")
    with pytest.raises(UnsupportedError, match="gemma2"):
        open_source(str(tmp_path / "gemma.gguf"))
    write_gguf(folder, tmp_path / "moe.gguf", metadata={"llama.expert_count": 8})
    with pytest.raises(UnsupportedError, match="mixture of experts"):
        open_source(str(tmp_path / "moe.gguf"))


def test_damaged_files_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(model_folder("llama"), path)
    whole = path.read_bytes()
    for size, said in ((len(whole) - 64, "truncated"), (700, "truncated within its header"), (10, "truncated")):
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=said):
            open_source(str(path))
        path.write_bytes(whole)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_source(str(path))
    path.write_bytes(whole[:4] + b"\x09\0\0\0" + whole[8:])
    with pytest.raises(UnsupportedError, match="version 9"):
        open_source(str(path))
    # A first key that claims to be longer than any header may be.
    path.write_bytes(whole[:24] + (2**40).to_bytes(8, "little") + whole[32:])
    with pytest.raises(CheckpointError, match="100,000,000"):
        open_source(str(path))


def test_missing_extra_and_infinite_tensors_are_named(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama")

    def drop(_writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        del tensors["blk.1.ffn_up.weight"]

    def add(_writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.strange.weight"] = np.zeros((4, 4), dtype=np.float32)

    def poison(_writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.ffn_up.weight"][0, 0] = np.inf

    write_gguf(folder, tmp_path / "a.gguf", change=drop)
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj.weight missing"):
        open_source(str(tmp_path / "a.gguf"))
    write_gguf(folder, tmp_path / "b.gguf", change=add)
    with pytest.raises(CheckpointError, match="blk.0.strange.weight"):
        open_source(str(tmp_path / "b.gguf"))
    write_gguf(folder, tmp_path / "c.gguf", change=poison)
    with pytest.raises(NumericsError, match="up_proj"):
        open_source(str(tmp_path / "c.gguf")).tensor("model.layers.1.mlp.up_proj.weight")
