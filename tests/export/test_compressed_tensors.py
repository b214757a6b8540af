"""compressed-tensors' own reader, inside transformers, gives the logits that our reference predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import w4a4.serve.integrations.transformers as integration
from w4a4.configs.errors import UnsupportedError
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.compressed_tensors import export_compressed_tensors, losses
from w4a4.export.fake_quant import input_weight
from w4a4.kernels.layout import ActMode, LinearLayout, Segment

pytest.importorskip("compressed_tensors")

Quantized = Callable[..., Path]


@pytest.mark.parametrize(
    ("kind", "recipe", "act"),
    [("llama-biased", "w4a16", "map"), ("qwen2", "w8a8", "a16"), ("llama", "rtn", "a16")],
)
@torch.inference_mode()
def test_weights_alone_give_our_logits(
    kind: str, recipe: str, act: ActMode, quantized: Quantized, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(quantized(kind, recipe))
    folder = export_compressed_tensors(checkpoint, tmp_path / "plain", act)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    packed = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    integration.configure(packed, act="a16")
    packed.set_attn_implementation("eager")  # a float32 cache, as theirs
    tokens = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    expected = packed(tokens).logits
    assert float(expected.std()) > 0.3
    assert float((model(tokens).logits - expected).abs().max()) < 1e-4


@torch.inference_mode()
def test_w8a8_differs_from_ours_by_its_rule_for_activation_scales(quantized: Quantized, tmp_path: Path) -> None:
    """transformers scales a token by absmax / 127.5, vLLM and we by absmax / 127: the same numbers but for rounding."""
    checkpoint = open_checkpoint(quantized("llama", "w8a8"))
    folder = export_compressed_tensors(checkpoint, tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    packed.set_attn_implementation("eager")
    tokens = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    expected = packed(tokens).logits
    integration.configure(packed, act="a16")
    rounding = float((expected - packed(tokens).logits).abs().max())
    assert 0 < float((model(tokens).logits - expected).abs().max()) < 2 * rounding


def test_the_config_says_what_the_tensors_are(quantized: Quantized, tmp_path: Path) -> None:
    folder = export_compressed_tensors(open_checkpoint(quantized("llama-biased", "w4a16")), tmp_path / "plain")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert (group["weights"]["num_bits"], group["weights"]["strategy"], group["weights"]["group_size"]) == (
        4,
        "group",
        64,
    )
    assert group["targets"] == ["Linear"] and group["input_activations"] is None


def test_permuted_columns_go_back_to_the_order_of_the_input(quantized: Quantized, tmp_path: Path) -> None:
    from dataclasses import replace

    from w4a4.export.compressed_tensors import _input_order

    linear = open_checkpoint(quantized("llama", "rtn")).linear("model.layers.0.mlp.down_proj")
    perm = torch.randperm(linear.layout.in_features, generator=torch.Generator().manual_seed(3)).int()
    permuted = replace(linear, perm=perm)
    assert torch.equal(input_weight(_input_order(permuted)), input_weight(permuted))


def test_what_would_be_lost_is_named(quantized: Quantized, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as raised:
        export_compressed_tensors(open_checkpoint(quantized("llama", "dual")), tmp_path / "plain", "a16")
    assert "weights of two precisions (128 of 4 bits + 128 of 8 bits) (q_proj of " in raised.value.message
    assert "the online Hadamard of 128 channels (down_proj of 2 layers)" in raised.value.message
    with pytest.raises(UnsupportedError, match="4-bit activations") as raised:
        export_compressed_tensors(open_checkpoint(quantized("llama", "rtn")), tmp_path / "plain")
    assert raised.value.hint == "--act a16 exports the weights alone"
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (LinearLayout(8, (Segment(64, 16, 4),)), []),
        (LinearLayout(8, (Segment(64, 8, 8),)), []),
        (LinearLayout(8, (Segment(64, 8, 4),)), ["int4 weights under 8-bit activations"]),
        (LinearLayout(8, (Segment(64, 16, 4),), hadamard=32), ["the online Hadamard of 32 channels"]),
        (LinearLayout(8, (Segment(64, 16, 16),)), ["columns kept in 16 bits"]),
        (
            LinearLayout(8, (Segment(64, 16, 4), Segment(64, 16, 4))),
            ["one weight scale per row in each of 2 segments"],
        ),
    ],
)
def test_losses_of_one_linear(layout: LinearLayout, expected: list[str]) -> None:
    assert losses(layout) == expected
