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
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import load_recipe
from w4a4.export.dual import DualTransform, dual_layouts, high_width
from w4a4.export.layer_quantizer import stored_inputs
from w4a4.export.plan import fit_recipe
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
MODELS = {
    "llama": {},
    "llama-tied-biased": {},
    "llama3": {"num_key_value_heads": 6},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen2-sliding": {},
    "qwen3": {},
    "qwen3-biased": {"attention_bias": True, "tie_word_embeddings": True},
}


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

    def __init__(self, source: Source, transform: DualTransform) -> None:
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

            assert all(bool((weights[f"{n}_layernorm.weight"] == 1).all()) for n in ("input", "post_attention"))
            inputs = math.norm(x)
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
            inputs = math.norm(x)
            hidden = F.silu(linear("mlp.gate_proj", inputs)) * linear("mlp.up_proj", inputs)
            x = x + linear("mlp.down_proj", hidden)
        gain, head = transform.head(self.source.tensor("model.norm.weight"), lm_head_weight(self.source))
        return F.linear(rms_norm(x, gain, config.rms_norm_eps), head)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_do_not_change(kind: str, model_folder: ModelFolder) -> None:
    source, stats = make(model_folder, kind, **MODELS[kind])
    recipe = fit_recipe(load_recipe("dual"), source.config)
    expected = FloatModel(source)(tokens())
    logits = TransformedModel(source, DualTransform(source.config, recipe, stats))(tokens())
    assert float(expected.std()) > 0.05
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"residual_basis": False},
        {"value_hadamard": False},
        {"key_scaling": False},
        {"kv_mean": False},
        {"channel_balance": True},
        {"channel_balance": True, "value_hadamard": False},
        {"kv_hadamard": False},
        {"down_hadamard": 1},
        {"down_hadamard": 32, "high_share": 0.0},
        {"seed": 5, "high_share": 0.5},
    ],
    ids=str,
)
def test_each_transform_can_be_left_out(change: dict[str, Any], model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    recipe = fit_recipe(load_recipe("dual", change), source.config)
    transform = DualTransform(source.config, recipe, stats)
    model = TransformedModel(source, transform)
    assert float((model(tokens()) - FloatModel(source)(tokens())).abs().max()) < TOLERANCE
    assert (transform.basis is None) == (change.get("residual_basis") is False)


@pytest.mark.parametrize("kind", ["llama", "llama-tied-biased", "qwen3"])
def test_static_means_are_those_of_the_transformed_keys_and_values(kind: str, model_folder: ModelFolder) -> None:
    """An invariance test cannot see a mean in the wrong basis: softmax does not care which vector is taken off."""
    source, stats = make(model_folder, kind)
    recipe = fit_recipe(load_recipe("dual"), source.config)

    def means(**change: Any) -> dict[str, list[Tensor]]:
        model = TransformedModel(source, DualTransform(source.config, load_recipe("dual", change), stats))
        total: dict[str, list[Tensor]] = {}
        for row in tokens():
            model(row[None])
            for name, value in model.seen.items():
                if name.endswith((".key", ".value")):
                    total.setdefault(name, []).append(value[SINK_TOKENS:])
        return {name: torch.cat(values).mean(0) for name, values in total.items()}

    assert recipe.kv_mean
    centred, plain = means(down_hadamard=64), means(down_hadamard=64, kv_mean=False)
    assert set(centred) == {"0.key", "0.value", "1.key", "1.value"}
    for name, value in centred.items():
        assert float(plain[name].abs().max()) > 0.02
        assert float(value.abs().max()) < 1e-4 * max(1.0, float(plain[name].abs().max()))


def test_the_widest_directions_are_the_eight_bit_segment(model_folder: ModelFolder) -> None:
    """The last coordinates of every norm's output hold as much energy as the largest eigenvalues allow."""
    source, stats = make(model_folder)
    recipe = fit_recipe(load_recipe("dual"), source.config)
    model = TransformedModel(source, DualTransform(source.config, recipe, stats))
    model(tokens())
    x = torch.cat([model.seen[f"{layer}.{point}"] for layer in (0, 1) for point in ("attn_in", "mlp_in")])
    moment = x.flatten(0, 1).T @ x.flatten(0, 1) / (tokens().numel())
    high = high_width(384, recipe.high_share)
    largest = torch.linalg.eigvalsh(stats.residual_covariance)[-high:].sum()
    # tokens of massive norm are left out of the covariance; a random model has none
    torch.testing.assert_close(moment.diagonal()[-high:].sum(), largest, rtol=1e-3, atol=0)
    assert high == 128


def test_the_heads_and_channels_that_matter_most_come_last(model_folder: ModelFolder) -> None:
    source, stats = make(model_folder)
    recipe = fit_recipe(load_recipe("dual"), source.config)
    weights, _, plan = DualTransform(source.config, recipe, stats).layer(1, layer_weights(source, 1))
    original = layer_weights(source, 1)
    share = stats.channel(1, "attn_out", "capped_energy") * original["self_attn.o_proj.weight"].square().sum(0)
    strongest = set(share.view(6, 64).sum(1).topk(2).indices.tolist())
    perm = plan["self_attn.o_proj"].perm
    assert perm is not None
    assert {int(channel) // 64 for channel in perm[-128:]} == strongest
    assert torch.equal(perm.view(6, 64) % 64, torch.arange(64).expand(6, 64))  # heads move whole
    energy = stats.channel(1, "mlp_hidden", "capped_energy") * original["mlp.down_proj.weight"].square().sum(0)
    order = torch.argsort(energy, stable=True)
    basis = DualTransform(source.config, recipe, stats).basis
    assert basis is not None
    torch.testing.assert_close(
        weights["mlp.down_proj.weight"], basis.T @ original["mlp.down_proj.weight"][:, order], rtol=1e-4, atol=1e-5
    )
    assert all(linear.perm is None for name, linear in plan.items() if name != "self_attn.o_proj")


def test_layouts_of_a_large_model() -> None:
    llama = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        }
    )
    layouts = dual_layouts(llama, load_recipe("dual"))
    assert layouts["self_attn.k_proj"].segments == (Segment(7168, 4, 4), Segment(1024, 8, 8))
    assert layouts["self_attn.o_proj"].segments == (Segment(7168, 4, 4), Segment(1024, 8, 8))
    assert layouts["mlp.down_proj"].segments == (Segment(25088, 4, 4), Segment(3584, 8, 8))
    assert [layouts[name].hadamard for name in ("mlp.up_proj", "mlp.down_proj")] == [1, 128]
    assert [layout.out_features for layout in layouts.values()] == [8192, 1024, 1024, 8192, 28672, 28672, 8192]


@pytest.mark.parametrize(
    ("width", "share", "multiple", "high"),
    [
        (4096, 0.125, 128, 512),
        (896, 0.125, 128, 128),
        (576, 0.125, 128, 128),
        (576, 0.0, 128, 0),
        (128, 0.125, 128, 0),
        (1536, 0.2, 256, 256),
        (512, 1.0, 128, 512),
    ],
)
def test_high_width(width: int, share: float, multiple: int, high: int) -> None:
    assert high_width(width, share, multiple) == high
