from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF, FloatModel, LayerMath, layer_weights, lm_head_weight
from w4a4.calibrate.source import Source, open_source
from w4a4.calibrate.statistics import CalibrationRun, CalibrationStats, collect
from w4a4.configs.recipe import load_recipe
from w4a4.export.balanced_blocks import BalancedBlocks, balanced_layouts
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.layer_quantizer import STAGES, stored_inputs
from w4a4.export.pipeline import quantize
from w4a4.export.plan import fit_recipe
from w4a4.export.promotion import block_widths
from w4a4.kernels.kv4 import prepare_qk
from w4a4.kernels.layout import Segment
from w4a4.kernels.reference import rms_norm

ModelFolder = Callable[..., Path]

TOLERANCE = 1e-4
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def tokens() -> Tensor:
    return torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(3))


def make(model_folder: ModelFolder, kind: str = "llama") -> tuple[Source, CalibrationStats]:
    source = open_source(str(model_folder(kind, **SIZES)))
    stats = collect(source, CalibrationRun("tiny", source.identity.sha256, "words", 3, 40, 0, ""), tokens())
    return source, stats


@torch.inference_mode()
def transformed_logits(source: Source, transform: BalancedBlocks, seen: dict[str, Tensor]) -> Tensor:
    """The transformed float weights as a checkpoint would run them, nothing rounded; `seen`: what each linear read."""
    config = source.config
    x = transform.embedding(source.tensor("model.embed_tokens.weight"))[tokens()]
    for layer in range(config.num_layers):
        weights, extra, plan = transform.layer(layer, layer_weights(source, layer))
        math = LayerMath(config, layer, x.shape[1])

        def linear(name: str, inputs: Tensor, layer=layer, weights=weights, plan=plan) -> Tensor:
            stored = stored_inputs(inputs, plan[name])
            seen[f"{layer}.{INPUT_OF[name]}"] = stored
            return F.linear(stored, plan[name].stored(weights[f"{name}.weight"]), weights.get(f"{name}.bias"))

        inputs = math.norm(x) * weights["input_layernorm.weight"]
        q, k, v = (linear(f"self_attn.{name}_proj", inputs).unflatten(-1, (-1, config.head_dim)) for name in "qkv")
        if config.qk_norm:
            q = rms_norm(q, weights["self_attn.q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, weights["self_attn.k_norm.weight"], config.rms_norm_eps)
        mean = extra.get("self_attn.k_mean")
        rows = [prepare_qk(q[i], k[i], math.cos, math.sin, mean, transform.recipe.kv_hadamard) for i in range(len(q))]
        attended = math.attend(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]), v)
        x = x + linear("self_attn.o_proj", attended)
        inputs = math.norm(x) * weights["post_attention_layernorm.weight"]
        x = x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", inputs)) * linear("mlp.up_proj", inputs))
    gain, head = transform.head(source.tensor("model.norm.weight"), lm_head_weight(source))
    return F.linear(rms_norm(x, gain, config.rms_norm_eps), head)


@pytest.mark.parametrize("kind", ["llama", "llama-tied-biased", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("has_hadamards", [False, True])
def test_logits_do_not_change(kind: str, has_hadamards: bool, model_folder: ModelFolder) -> None:
    source, stats = make(model_folder, kind)
    changes = {} if has_hadamards else {"value_hadamard": False, "down_hadamard": 1}
    recipe = fit_recipe(load_recipe("fmpq-int8", changes), source.config)
    expected = FloatModel(source)(tokens())
    logits = transformed_logits(source, BalancedBlocks(source.config, recipe, stats), {})
    assert float(expected.std()) > 0.05
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("channel_balance", [False, True])
def test_channels_ascend_by_magnitude(channel_balance: bool, model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    recipe = load_recipe(
        "fmpq-int8", {"channel_balance": channel_balance, "kv_mean": False, "value_hadamard": False, "down_hadamard": 1}
    )
    seen: dict[str, Tensor] = {}
    transformed_logits(source, BalancedBlocks(source.config, recipe, stats), seen)
    assert len(seen) == 4 * source.config.num_layers
    for point, x in seen.items():
        energy = x.flatten(0, 1).square().mean(0)
        # the cap on massive tokens tells first positions, which attention does not average, from the rest
        assert bool((energy.diff() >= (-0.1 if "attn_out" in point else -1e-4) * energy.max()).all()), point


def test_block_widths_spend_the_budget_in_whole_blocks(model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    config = source.config
    recipe = load_recipe("fmpq-int8", {"budget": 0.3})
    transform = BalancedBlocks(config, recipe, stats)

    def prepared(layer: int) -> tuple[dict[str, Tensor], dict[str, object]]:
        weights, _, plan = transform.layer(layer, layer_weights(source, layer))
        return weights, plan

    hidden = transform.embedding(source.tensor("model.embed_tokens.weight"))[tokens()]
    with torch.inference_mode():
        widths = block_widths(config, recipe, prepared, hidden)
    shapes = config.linear_shapes()
    sizes = torch.tensor([64, 64, 64, 128])  # of blocks: 192 = 3 x 64, 256 = 2 x 128
    assert widths.shape == (config.num_layers, 4) and bool((widths % sizes == 0).all())
    rows = torch.tensor([sum(shapes[name][0] for name in stage) for stage in STAGES])
    spent, total = int((widths * rows).sum()), config.num_layers * sum(n * k for n, k in shapes.values())
    assert 0.2 * total < spent <= 0.3 * total


def test_the_checkpoint_has_the_blocks_and_int8_under_them(model_folder: ModelFolder, tmp_path: Path) -> None:
    source, stats = make(model_folder)
    checkpoint = open_checkpoint(quantize(source, stats, load_recipe("fmpq-int8"), tmp_path / "out"))
    high = total = 0
    for layer in range(source.config.num_layers):
        for stage in STAGES:
            linears = [checkpoint.linear(f"model.layers.{layer}.{name}") for name in stage]
            assert all(linear.layout.segments == linears[0].layout.segments for linear in linears)
            for linear in linears:
                assert all((s.act_bits, s.weight_bits) in ((4, 4), (8, 8)) for s in linear.layout.segments)
                high += linear.layout.out_features * sum(s.width for s in linear.layout.segments if s.act_bits == 8)
                total += linear.layout.out_features * linear.layout.in_features
                assert linear.perm is not None
    assert 0.05 * total < high <= 0.2 * total
    assert checkpoint.config.tie_word_embeddings == source.config.tie_word_embeddings


def test_layouts_before_the_budget_is_spent(model_folder: ModelFolder) -> None:
    config = open_source(str(model_folder("llama", **SIZES))).config
    for name, layout in balanced_layouts(config, load_recipe("fmpq-int8")).items():
        rows, columns = config.linear_shapes()[name]
        assert (layout.out_features, layout.segments) == (rows, (Segment(columns, 4, 4),))
