"""The exported float model computes what the checkpoint computes with nothing but its weights rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import w4a4.serve.integrations.transformers as integration
from w4a4.configs.errors import UnsupportedError, UsageError
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.fake_quant import export_fake_quant, input_weight
from w4a4.kernels.reference import quantize_activation, w4ax_gemm
from w4a4.serve.model import CausalLM

Quantized = Callable[..., Path]

CACHE_ROUNDING = 0.05  # of logits whose standard deviation is 1: our 16-bit cache is bf16, theirs float32
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dual", {}),
    ("llama-biased", "dual", {}),
    ("qwen2", "dual", {}),
    ("qwen3", "dual", {}),
    ("qwen2-sliding", "dual", {"kv_mean": False}),
    *(("llama", recipe, {}) for recipe in ("quik", "fmpq-int8", "w4a16")),
]


def tokens() -> Tensor:
    return torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("kind", "recipe", "overrides"), CASES)
@torch.inference_mode()
def test_logits_are_those_of_the_checkpoint_with_unquantised_activations(
    kind: str, recipe: str, overrides: dict[str, Any], quantized: Quantized, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(quantized(kind, recipe, **overrides))
    folder = export_fake_quant(checkpoint, tmp_path / "plain", torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    logits = model(tokens()).logits
    ours = CausalLM(checkpoint, act="a16", kv_bits=16).score(tokens())
    assert float(ours.std()) > 0.3
    assert float((logits - ours).abs().max()) < CACHE_ROUNDING
    packed = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    integration.configure(packed, act="a16")
    packed.set_attn_implementation("eager")  # a float32 cache: nothing is rounded but the weights
    assert float((logits - packed(tokens()).logits).abs().max()) < 1e-4


def test_the_weight_multiplies_the_input_as_it_comes(quantized: Quantized) -> None:
    """Permutation and Hadamard are undone: both forms of every linear give the same product."""
    checkpoint = open_checkpoint(quantized("llama", "dual"))
    for prefix in checkpoint.linear_names:
        linear = checkpoint.linear(prefix)
        layout = linear.layout.at("a16")
        x = torch.randn(5, layout.in_features, generator=torch.Generator().manual_seed(1))
        perm = None if linear.perm is None else linear.perm.long()
        expected = w4ax_gemm(quantize_activation(x, layout, perm), linear.weights, linear.weight_scales, layout)
        assert float((x @ input_weight(linear).T - expected).abs().max()) < 1e-4, prefix


def test_weights_are_bf16_and_side_files_come_along(quantized: Quantized, tmp_path: Path) -> None:
    source = quantized("llama", "dual")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    folder = export_fake_quant(open_checkpoint(source), tmp_path / "plain")
    (source / "chat_template.jinja").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not (folder / "w4a4_manifest.json").exists()


def test_a_sliding_window_and_a_mean_off_the_values_have_no_plain_form(quantized: Quantized, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"biases on o_proj, v_proj.* window of 6"):
        export_fake_quant(open_checkpoint(quantized("mistral", "dual")), tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_an_output_that_exists_is_left_alone(quantized: Quantized, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "mine").write_text("x")
    with pytest.raises(UsageError, match="exists"):
        export_fake_quant(open_checkpoint(quantized("llama", "dual")), tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["mine"]
