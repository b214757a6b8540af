from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.decoder import INPUT_OF, FloatModel, LayerMath, layer_weights, lm_head_weight
from w4a4.calibrate.source import Source, open_source
from w4a4.calibrate.statistics import SINK_TOKENS, CalibrationRun, CalibrationStats, collect
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
    "hidden_size": 384,
    "intermediate_size": 448,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {},
    "llama3": {"num_key_value_heads": 6},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen2-sliding": {},
    "qwen3": {},
    "qwen3-biased": {"attention_bias": True, "tie_word_embeddings": True},
}
RECIPES = ("dual", "fmpq-int8")


def tokens() -> Tensor:
    return torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(3))


def make(model_folder: ModelFolder, kind: str = "llama", **changes: Any) -> tuple[Source, CalibrationStats]:
    folder = model_folder(kind.removesuffix("-biased") if kind == "qwen3-biased" else kind, **(SIZES | changes))
    source = open_source(str(folder))
    stats = collect(source, CalibrationRun("tiny", source.identity.sha256, "words", 3, 40, 0, ""), tokens())
    return source, stats


class TransformedModel:
    """The transformed float weights run as a checkpoint would run: inputs in stored order and basis, keys off their
    mean, q and k rotated; nothing rounded. `seen` keeps what attention and each linear got, by layer."""

    def __init__(self, source: Source, transform: BalancedBlocks) -> None:
        self.source, self.transform = source, transform
        self.seen: dict[str, Tensor] = {}

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        config, transform = self.source.config, self.transform
        x = transform.embedding(self.source.tensor("model.embed_tokens.weight"))[ids]
        for layer in range(config.num_layers):
            weights, extra, plan = transform.layer(layer, layer_weights(self.source, layer))
            math = LayerMath(config, layer, ids.shape[1])

            def linear(name: str, inputs: Tensor, layer=layer, weights=weights, plan=plan) -> Tensor:
                stored = stored_inputs(inputs, plan[name])
                self.seen[f"{layer}.{INPUT_OF[name]}"] = stored
                return F.linear(stored, plan[name].stored(weights[f"{name}.weight"]), weights.get(f"{name}.bias"))

            inputs = math.norm(x) * weights["input_layernorm.weight"]
            q, k, v = (linear(f"self_attn.{name}_proj", inputs) for name in "qkv")
            q, k, v = (heads.unflatten(-1, (-1, config.head_dim)) for heads in (q, k, v))
            if config.qk_norm:
                q = rms_norm(q, weights["self_attn.q_norm.weight"], config.rms_norm_eps)
                k = rms_norm(k, weights["self_attn.k_norm.weight"], config.rms_norm_eps)
            mean = extra.get("self_attn.k_mean")
            self.seen[f"{layer}.key"], self.seen[f"{layer}.value"] = (
                prepare_qk(k[0], k[0], math.cos, math.sin, mean, False)[1],
                v[0],
            )
            rows = [prepare_qk(q[i], k[i], math.cos, math.sin, mean, self.transform.recipe.kv_hadamard)
                    for i in range(len(ids))]  # fmt: skip
            attended = math.attend(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]), v)
            x = x + linear("self_attn.o_proj", attended)
            inputs = math.norm(x) * weights["post_attention_layernorm.weight"]
            hidden = F.silu(linear("mlp.gate_proj", inputs)) * linear("mlp.up_proj", inputs)
            x = x + linear("mlp.down_proj", hidden)
        gain, head = transform.head(self.source.tensor("model.norm.weight"), lm_head_weight(self.source))
        return F.linear(rms_norm(x, gain, config.rms_norm_eps), head)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_logits_do_not_change(kind: str, name: str, model_folder: ModelFolder) -> None:
    source, stats = make(model_folder, kind, **MODELS[kind])
    recipe = fit_recipe(load_recipe(name), source.config)
    expected = FloatModel(source)(tokens())
    logits = TransformedModel(source, BalancedBlocks(source.config, recipe, stats))(tokens())
    assert float(expected.std()) > 0.05
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"residual_basis": False},
        {"channel_balance": False},
        {"value_hadamard": False},
        {"channel_balance": False, "value_hadamard": False},
        {"key_scaling": False},
        {"kv_mean": False},
        {"kv_hadamard": False},
        {"down_hadamard": 1},
        {"down_hadamard": 32, "seed": 5},
    ],
    ids=str,
)
def test_each_transform_can_be_left_out(change: dict[str, Any], model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    recipe = fit_recipe(load_recipe("dual", change), source.config)
    transform = BalancedBlocks(source.config, recipe, stats)
    model = TransformedModel(source, transform)
    assert float((model(tokens()) - FloatModel(source)(tokens())).abs().max()) < TOLERANCE
    assert (transform.basis is None) == (change.get("residual_basis") is False)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["llama", "llama-tied-biased", "qwen3"])
def test_static_means_are_those_of_the_transformed_keys_and_values(
    kind: str, name: str, model_folder: ModelFolder
) -> None:
    """An invariance test cannot see a mean in the wrong basis: softmax does not care which vector is taken off."""
    source, stats = make(model_folder, kind)
    assert load_recipe(name).kv_mean

    def means(**change: Any) -> dict[str, list[Tensor]]:
        model = TransformedModel(source, BalancedBlocks(source.config, load_recipe(name, change), stats))
        total: dict[str, list[Tensor]] = {}
        for row in tokens():
            model(row[None])
            for point, value in model.seen.items():
                if point.endswith((".key", ".value")):
                    total.setdefault(point, []).append(value[SINK_TOKENS:])
        return {point: torch.cat(values).mean(0) for point, values in total.items()}

    centred, plain = means(down_hadamard=64), means(down_hadamard=64, kv_mean=False)
    assert set(centred) == {"0.key", "0.value", "1.key", "1.value"}
    for point, value in centred.items():
        assert float(plain[point].abs().max()) > 0.02
        assert float(value.abs().max()) < 1e-4 * max(1.0, float(plain[point].abs().max()))


@pytest.mark.parametrize("name", RECIPES)
def test_balance_brings_inputs_and_weights_to_the_least_product(name: str, model_folder: ModelFolder) -> None:
    """(Σ E x_i²) (Σ ‖W_i‖²) falls to (Σ rms(x_i) ‖W_i‖)² where the balance is a stage's own, and near it where the
    stages of the stream share the energies of its axes."""
    source, stats = make(model_folder)

    def products(channel_balance: bool) -> dict[str, float]:
        recipe = load_recipe(name, {"channel_balance": channel_balance, "kv_mean": False, "value_hadamard": False,
                                    "down_hadamard": 1})  # fmt: skip
        transform = BalancedBlocks(source.config, recipe, stats)
        model = TransformedModel(source, transform)
        model(tokens())
        found = {}
        for layer in range(source.config.num_layers):
            weights, _, plan = transform.layer(layer, layer_weights(source, layer))
            for stage in STAGES:
                point = f"{layer}.{INPUT_OF[stage[0]]}"
                energy = model.seen[point].flatten(0, 1).square().mean(0)
                stacked = torch.cat([plan[linear].stored(weights[f"{linear}.weight"]) for linear in stage])
                columns = stacked.square().sum(0)
                found[point] = float(energy.sum() * columns.sum() / (energy * columns).sqrt().sum().square())
        return found

    balanced, plain = products(True), products(False)
    for point, excess in balanced.items():
        shared = point.endswith("attn_out") or (name == "dual" and point.endswith("_in"))
        assert excess < (1.15 if shared else 1.01), point
        assert plain[point] > excess - 1e-4
    assert max(plain.values()) > 1.2


@pytest.mark.parametrize("name", RECIPES)
def test_channels_ascend_by_what_they_contribute(name: str, model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    recipe = load_recipe(name, {"kv_mean": False, "value_hadamard": False, "down_hadamard": 1})
    transform = BalancedBlocks(source.config, recipe, stats)
    model = TransformedModel(source, transform)
    model(tokens())
    for layer in range(source.config.num_layers):
        weights, _, plan = transform.layer(layer, layer_weights(source, layer))
        for stage in STAGES:
            point = f"{layer}.{INPUT_OF[stage[0]]}"
            energy = model.seen[point].flatten(0, 1).square().mean(0)
            stacked = torch.cat([plan[linear].stored(weights[f"{linear}.weight"]) for linear in stage])
            share = energy * stacked.square().sum(0)
            if name == "dual" and point.endswith("_in"):  # axes of the stream: by blocks, one order for all layers
                assert plan[stage[0]].perm is None
                share = share.view(-1, 64).mean(1)
                assert share[-1] == share.max() and share[-1] > 2 * share[0]
                continue
            # statistics cap tokens of large norm, so neighbours can change places
            assert bool((share.diff() >= -0.1 * share.max()).all()), point
            assert share[-1] > 2 * share[0]


def test_the_widest_directions_come_last(model_folder: ModelFolder) -> None:
    """The last blocks of the stream hold as much energy as the largest eigenvalues allow."""
    source, stats = make(model_folder)
    recipe = fit_recipe(load_recipe("dual", {"channel_balance": False}), source.config)
    model = TransformedModel(source, BalancedBlocks(source.config, recipe, stats))
    model(tokens())
    x = torch.cat([model.seen[f"{layer}.{point}"] for layer in (0, 1) for point in ("attn_in", "mlp_in")])
    moment = x.flatten(0, 1).T @ x.flatten(0, 1) / (tokens().numel())
    eigenvalues = torch.linalg.eigvalsh(stats.residual_covariance)
    for high in (64, 128, 256):  # tokens of massive norm are left out of the covariance; a random model has none
        torch.testing.assert_close(moment.diagonal()[-high:].sum(), eigenvalues[-high:].sum(), rtol=1e-3, atol=0)


def test_whole_heads_move_where_values_are_rotated(model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    _, _, plan = BalancedBlocks(source.config, load_recipe("dual"), stats).layer(1, layer_weights(source, 1))
    original = layer_weights(source, 1)["self_attn.o_proj.weight"]
    share = stats.channel(1, "attn_out", "capped_energy") * original.square().sum(0)
    perm = plan["self_attn.o_proj"].perm
    assert perm is not None
    assert (perm.view(6, 64)[:, 0] // 64).tolist() == share.view(6, 64).sum(1).argsort().tolist()
    assert torch.equal(perm.view(6, 64) % 64, torch.arange(64).expand(6, 64))
    assert plan["mlp.down_proj"].perm is None  # its order is folded


def test_block_widths_spend_the_budget_in_whole_blocks(model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    config = source.config
    recipe = fit_recipe(load_recipe("dual", {"budget": 0.3}), config)
    transform = BalancedBlocks(config, recipe, stats)

    def prepared(layer: int) -> tuple[dict[str, Tensor], dict[str, object]]:
        weights, _, plan = transform.layer(layer, layer_weights(source, layer))
        return weights, plan

    hidden = transform.embedding(source.tensor("model.embed_tokens.weight"))[tokens()]
    with torch.inference_mode():
        widths = block_widths(config, recipe, prepared, hidden)
    shapes = config.linear_shapes()
    sizes = torch.tensor([128, 128, 128, 64])  # of blocks: 384 = 3 x 128, 448 = 7 x 64
    assert widths.shape == (config.num_layers, 4) and bool((widths % sizes == 0).all())
    rows = torch.tensor([sum(shapes[name][0] for name in stage) for stage in STAGES])
    spent, total = int((widths * rows).sum()), config.num_layers * sum(n * k for n, k in shapes.values())
    assert 0.2 * total < spent <= 0.3 * total


@pytest.mark.parametrize("name", RECIPES)
def test_the_checkpoint_has_the_blocks_and_int8_under_them(
    name: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    source, stats = make(model_folder, "llama-tied-biased")
    checkpoint = open_checkpoint(quantize(source, stats, load_recipe(name), tmp_path / "out"))
    high = total = 0
    for layer in range(source.config.num_layers):
        for stage in STAGES:
            linears = [checkpoint.linear(f"model.layers.{layer}.{linear}") for linear in stage]
            assert all(linear.layout.segments == linears[0].layout.segments for linear in linears)
            for linear in linears:
                assert all((s.act_bits, s.weight_bits) in ((4, 4), (8, 8)) for s in linear.layout.segments)
                high += linear.layout.out_features * sum(s.width for s in linear.layout.segments if s.act_bits == 8)
                total += linear.layout.out_features * linear.layout.in_features
            permuted = "self_attn.o_proj" in stage or (name == "fmpq-int8" and "mlp.down_proj" not in stage)
            assert (linears[0].perm is not None) == permuted
    assert 0.05 * total < high <= 0.2 * total
    assert source.config.tie_word_embeddings
    assert checkpoint.config.tie_word_embeddings == (name == "fmpq-int8")


def test_layouts_before_the_budget_is_spent(model_folder: ModelFolder) -> None:
    config = open_source(str(model_folder("llama", **SIZES))).config
    for name, layout in balanced_layouts(config, load_recipe("dual")).items():
        rows, columns = config.linear_shapes()[name]
        assert (layout.out_features, layout.segments) == (rows, (Segment(columns, 4, 4),))
        assert layout.hadamard == (128 if name == "mlp.down_proj" else 1)
