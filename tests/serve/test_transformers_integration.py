"""A packed checkpoint in transformers gives what it gives in our own runtime."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import w4a4.serve.integrations.transformers as integration
from w4a4.configs.errors import CheckpointError, UnsupportedError
from w4a4.export.checkpoint import open_checkpoint
from w4a4.kernels.layout import ActMode
from w4a4.serve.integrations.packed_module import PackedLinearModule
from w4a4.serve.model import CausalLM

PackedFolder = Callable[..., Path]

TOLERANCE = 1e-4  # of logits whose standard deviation is 1
TENSOR = "model.layers.1.self_attn.o_proj.input_perm"


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def random_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(5))


def generate(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, "pad_token_id": 0} | options
    generated: Tensor = model.generate(tokens, do_sample=False, eos_token_id=None, **options)
    return generated


def greedy(model: CausalLM, tokens: Tensor, count: int = 12) -> Tensor:
    for _ in range(count):
        tokens = torch.cat([tokens, model.score(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


CASES = [
    ("llama", "dual", {}),
    ("llama-biased", "dual", {}),
    ("mistral", "dual", {}),
    ("qwen2", "dual", {}),
    ("qwen2-sliding", "dual", {}),
    ("qwen3", "dual", {}),
    *(("llama", recipe, {}) for recipe in ("rtn", "quik", "fmpq-int8", "w4a16")),
    ("llama", "dual", {"kv_hadamard": False}),
    ("llama", "dual", {"kv_mean": False}),
    ("llama", "dual", {"sink_tokens": 0}),
    ("llama", "dual", {"kv_bits": 16}),
]


@pytest.mark.parametrize(("kind", "recipe", "overrides"), CASES)
@torch.inference_mode()
def test_logits_equal_our_own(kind: str, recipe: str, overrides: dict[str, Any], packed_folder: PackedFolder) -> None:
    folder = packed_folder(kind, recipe, **overrides)
    tokens = random_tokens(2, 40)
    expected = CausalLM(open_checkpoint(folder)).score(tokens)
    logits = load(folder)(tokens).logits
    assert logits.dtype == torch.float32
    assert float(expected.std()) > 0.3
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_texts_equal_our_own(kind: str, packed_folder: PackedFolder) -> None:
    folder = packed_folder(kind)
    tokens = random_tokens(2, 10)
    generated = generate(load(folder), tokens)
    assert torch.equal(generated, greedy(CausalLM(open_checkpoint(folder)), tokens))


def test_every_tensor_is_loaded_into_packed_modules(packed_folder: PackedFolder) -> None:
    folder = packed_folder("qwen2")
    model, report = load(folder, output_loading_info=True)
    assert not any(report.values()), report
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinearModule)}
    checkpoint = open_checkpoint(folder)
    assert list(modules) == checkpoint.linear_names and len(modules) == 14
    for name, module in modules.items():
        for suffix, stored in checkpoint.linear_tensors(name).items():
            loaded = module.stored[suffix]
            assert loaded.dtype == stored.dtype and torch.equal(loaded, stored), f"{name}.{suffix}"
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert linears == ["lm_head"]


@pytest.mark.parametrize("act", ["map", "a8", "a16"])
@pytest.mark.parametrize("kv_bits", [4, 16])
@torch.inference_mode()
def test_modes_equal_our_own(act: ActMode, kv_bits: int, packed_folder: PackedFolder) -> None:
    folder = packed_folder("llama")
    tokens = random_tokens(1, 30)
    model = load(folder)
    integration.configure(model, act, kv_bits)
    expected = CausalLM(open_checkpoint(folder), act=act, kv_bits=kv_bits).score(tokens)
    assert float((model(tokens).logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_padding_changes_nothing(kind: str, packed_folder: PackedFolder) -> None:
    """Sinks are the first tokens of a text, not of a padded row."""
    model = load(packed_folder(kind))
    tokens = random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    tokens[0, :5] = 0
    together = generate(model, tokens, attention_mask=mask)
    assert torch.equal(together[:1, 5:], generate(model, tokens[:1, 5:]))
    assert torch.equal(together[1:], generate(model, tokens[1:]))


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_any_cache_gives_the_same_text(options: dict[str, Any], packed_folder: PackedFolder) -> None:
    model = load(packed_folder("llama"))
    model.generation_config.disable_compile = True
    tokens = random_tokens(2, 10)
    assert torch.equal(generate(model, tokens, **options), generate(model, tokens))


def test_beams_score_as_our_own_logits_do(packed_folder: PackedFolder) -> None:
    folder = packed_folder("llama")
    tokens = random_tokens(1, 10)
    result = generate(
        load(folder), tokens, num_beams=3, max_new_tokens=6, return_dict_in_generate=True, output_scores=True
    )
    texts = result.sequences  # type: ignore[attr-defined]
    logits = CausalLM(open_checkpoint(folder)).score(texts)[:, 9:-1].log_softmax(-1)
    mean = logits.gather(2, texts[:, 10:, None]).mean()
    assert float(result.sequences_scores[0]) == pytest.approx(float(mean), abs=1e-4)  # type: ignore[attr-defined]


def test_kv4_is_what_generate_reads(packed_folder: PackedFolder) -> None:
    """The texts above would differ if a cache of another precision were read."""
    model = load(packed_folder("llama"))
    tokens = random_tokens(4, 10)
    with_kv4 = generate(model, tokens)
    integration.configure(model, kv_bits=16)
    assert not torch.equal(generate(model, tokens), with_kv4)


@torch.inference_mode()
def test_a_dtype_that_was_asked_for_gives_way_to_the_kernels(packed_folder: PackedFolder) -> None:
    folder = packed_folder("llama")
    tokens = random_tokens(1, 8)
    model = load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.float32
    assert torch.equal(model(tokens).logits, load(folder)(tokens).logits)


def test_it_is_not_saved_again(packed_folder: PackedFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        load(packed_folder("llama")).save_pretrained(tmp_path)


def test_kv_bits_are_four_or_sixteen(packed_folder: PackedFolder) -> None:
    with pytest.raises(ValueError, match="kv_bits must be 4 or 16, got 8"):
        integration.configure(load(packed_folder("llama")), kv_bits=8)


# Bad checkpoints.


@pytest.fixture
def broken(packed_folder: PackedFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed_folder("llama"), tmp_path / "broken"))


def change_shards(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


def test_a_missing_tensor_is_an_error(broken: Path) -> None:
    name = TENSOR.replace("input_perm", "weight_scale")

    def remove(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)

    change_shards(broken, remove)
    index = broken / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"][name]
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="weight_scale"):
        load(broken)


def test_a_permutation_with_repeats_is_an_error(broken: Path) -> None:
    def repeat(tensors: dict[str, Tensor]) -> None:
        if TENSOR in tensors:
            tensors[TENSOR][1] = tensors[TENSOR][0]

    change_shards(broken, repeat)
    with pytest.raises(CheckpointError, match="input_perm: .*repeated"):
        load(broken)


def test_another_model_than_the_checkpoint_is_of_is_an_error(packed_folder: PackedFolder) -> None:
    from transformers import AutoConfig

    folder = packed_folder("llama")
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    with pytest.raises(CheckpointError, match="model.layers.2"):
        load(folder, config=config)


def test_weights_from_elsewhere_are_refused(packed_folder: PackedFolder) -> None:
    folder = packed_folder("llama")
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UnsupportedError, match="from its folder"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict={})
    with pytest.raises(UnsupportedError, match="disk"):
        integration.W4A4Quantizer(config.quantization_config).validate_environment(device_map={"": "disk"})


# Positions of cached keys.


def test_key_positions() -> None:
    causal = torch.ones(5, 5).tril().bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1]])  # two texts in one row
    assert torch.equal(integration.key_positions(positions, causal), positions)
    one = torch.tensor([[[[False, False, True, True]]], [[[True, True, True, True]]]])
    assert integration.key_positions(torch.tensor([[1], [3]]), one).tolist() == [[-2, -1, 0, 1], [0, 1, 2, 3]]
    static = torch.tensor([[[[True, True, False, False], [True, True, True, False]]]])
    assert integration.key_positions(torch.tensor([[1, 2]]), static).tolist() == [[0, 1, 2, 3]]
    window = torch.tensor([[[[False, True, True]]]])
    assert integration.key_positions(torch.tensor([[9]]), window).tolist() == [[7, 8, 9]]
