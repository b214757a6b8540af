from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.decoder import LayerMath
from w4a4.calibrate.statistics import token_weights
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import NumericsError
from w4a4.configs.recipe import Recipe, load_recipe
from w4a4.export import layer_quantizer
from w4a4.export.gptq import assemble
from w4a4.export.layer_quantizer import (
    STAGES,
    LayerResult,
    fake_quantize,
    quantize_layer,
    round_weight,
    stored_inputs,
)
from w4a4.export.plan import LayerPlan, LinearPlan
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import block_hadamard, quantize_activation, w4ax_gemm

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)
NUM_SEQUENCES, NUM_TOKENS = 4, 64
DUAL = load_recipe("dual", {"down_hadamard": 64})


@dataclass
class Layer:
    """A random layer, its plan (mixed precision, orders, a Hadamard), and what enters it."""

    weights: dict[str, Tensor]
    plan: LayerPlan
    hidden: Tensor

    @property
    def math(self) -> LayerMath:
        return LayerMath(CONFIG, 0, self.hidden.shape[1])

    def quantize(self, recipe: Recipe = DUAL) -> tuple[LayerResult, Tensor]:
        """The result, and the residual stream after the layer."""
        hidden = self.hidden.clone()
        with torch.inference_mode():
            return quantize_layer(self.math, self.weights, self.plan, hidden, recipe), hidden


@pytest.fixture
def layer() -> Layer:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights: dict[str, Tensor] = {}
    for name, (rows, columns) in CONFIG.linear_shapes().items():
        weights[f"{name}.weight"] = random(rows, columns, scale=columns**-0.5)
        weights[f"{name}.bias"] = random(rows, scale=0.3)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{norm}.weight"] = torch.rand(128, generator=generator) + 0.5
    plan: dict[str, LinearPlan] = {}
    perms = {stage[0]: torch.randperm(weights[f"{stage[0]}.weight"].shape[1], generator=generator) for stage in STAGES}
    for stage in STAGES:
        for name in stage:
            rows, columns = weights[f"{name}.weight"].shape
            hadamard = 64 if name == "mlp.down_proj" else 1
            layout = LinearLayout(rows, (Segment(columns - 64, 4, 4), Segment(64, 8, 8)), hadamard=hadamard)
            plan[name] = LinearPlan(layout, None if name == "mlp.down_proj" else perms[stage[0]])
    hidden = random(NUM_SEQUENCES, NUM_TOKENS, 128)
    hidden[..., 5] *= 6  # a channel and a token that stand out
    hidden[1, 9] *= 30
    return Layer(weights, plan, hidden)


def stored_weight(result: LayerResult, name: str) -> Tensor:
    """The weight that codes and scales stand for, in stored order."""
    linear = result.linears[name]
    return assemble(linear.weights, linear.weight_scales, linear.layout.segments, linear.layout.group_size)


def input_weight(result: LayerResult, layer: Layer, name: str) -> Tensor:
    """The same in the order and basis of the layer's own inputs."""
    plan = layer.plan[name]
    weight = block_hadamard(stored_weight(result, name), plan.layout.hadamard)
    if plan.perm is None:
        return weight
    out = torch.empty_like(weight)
    out[:, plan.perm] = weight
    return out


def quantized_weights(result: LayerResult, layer: Layer, names: tuple[str, ...]) -> dict[str, Tensor]:
    return layer.weights | {f"{name}.weight": input_weight(result, layer, name) for name in names}


def stage_inputs(layer: Layer, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each stage reads when the layer runs with `weights`, [sequences, T, K] by first linear of the stage."""
    seen: dict[str, list[Tensor]] = {}
    for row in layer.hidden:
        layer.math.forward(weights, row[None], lambda point, x: seen.setdefault(point, []).append(x[0]))
    points = ("attn_in", "attn_out", "mlp_in", "mlp_hidden")
    return {stage[0]: torch.stack(seen[point]) for stage, point in zip(STAGES, points, strict=True)}


def test_the_stream_goes_through_the_rounded_layer(layer: Layer) -> None:
    result, hidden = layer.quantize()
    rounded = quantized_weights(result, layer, tuple(layer.plan))
    expected = torch.cat([layer.math.forward(rounded, row[None]) for row in layer.hidden])
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    exact = torch.cat([layer.math.forward(layer.weights, row[None]) for row in layer.hidden])
    error = float((hidden - exact).norm() / exact.norm())
    assert 0.005 < error < 0.2


def test_each_stage_is_fitted_to_the_rounded_stages_before_it(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hessian that GPTQ gets is E[w x xᵀ] of inputs that quantised weights, not float ones, have made."""
    hessians: list[Tensor] = []
    real = layer_quantizer.gptq

    def spy(weight: Tensor, hessian: Tensor, *args: Any, **kwargs: Any) -> Any:
        hessians.append(hessian.clone())
        return real(weight, hessian, *args, **kwargs)

    monkeypatch.setattr(layer_quantizer, "gptq", spy)
    result, _ = layer.quantize()
    assert len(hessians) == len(STAGES)

    def moments(inputs: Tensor, stage: tuple[str, ...]) -> Tensor:
        total = torch.zeros(inputs.shape[-1], inputs.shape[-1])
        for sequence in inputs:
            x = stored_inputs(sequence, layer.plan[stage[0]])
            weights = token_weights(x)
            assert float(weights.max()) == 1.0
            total += torch.einsum("t,ti,tj->ij", weights, x, x)
        return total / (NUM_SEQUENCES * NUM_TOKENS)

    done: tuple[str, ...] = ()
    for stage, hessian in zip(STAGES, hessians, strict=True):
        inputs = stage_inputs(layer, quantized_weights(result, layer, done))[stage[0]]
        torch.testing.assert_close(hessian, moments(inputs, stage), rtol=1e-3, atol=1e-4 * float(hessian.max()))
        if done:
            float_inputs = stage_inputs(layer, layer.weights)[stage[0]]
            assert float((moments(float_inputs, stage) - hessian).abs().max()) > 1e-3 * float(hessian.max())
        done += stage


def test_errors_equal_the_integer_product_on_the_stages_own_inputs(layer: Layer) -> None:
    result, _ = layer.quantize()
    done: tuple[str, ...] = ()
    for stage in STAGES:
        inputs = stage_inputs(layer, quantized_weights(result, layer, done))[stage[0]].flatten(0, 1)
        for name in stage:
            linear = result.linears[name]
            activation = quantize_activation(inputs, linear.layout, linear.perm)
            y = w4ax_gemm(activation, linear.weights, linear.weight_scales, linear.layout)
            exact = inputs @ layer.weights[f"{name}.weight"].T
            expected = float((y - exact).square().sum() / exact.square().sum())
            assert result.errors[name] == pytest.approx(expected, rel=1e-3)
            assert 1e-5 < expected < 0.2
        done += stage


def test_linears_that_share_an_input_share_its_clip_map_and_order(layer: Layer) -> None:
    result, _ = layer.quantize()
    for stage in STAGES:
        layouts = [result.linears[name].layout for name in stage]
        assert len({(layout.clip, layout.segments, layout.hadamard) for layout in layouts}) == 1
        c, beta = layouts[0].clip
        assert c < 1 or beta < float("inf")  # Gaussian inputs are always worth clipping
        perms = [result.linears[name].perm for name in stage]
        if perms[0] is None:
            assert perms == [None] * len(stage)
            continue
        assert all(perm is not None and torch.equal(perm, perms[0]) for perm in perms)
    plain, _ = layer.quantize(replace(DUAL, clip_search=False))
    assert {linear.layout.clip for linear in plain.linears.values()} == {(1.0, float("inf"))}


def test_what_is_stored(layer: Layer) -> None:
    result, _ = layer.quantize()
    assert list(result.linears) == list(CONFIG.linear_shapes())
    for name, linear in result.linears.items():
        rows, columns = layer.weights[f"{name}.weight"].shape
        int4, int8 = linear.weights
        assert int4.shape == (rows, columns - 64) and int8.shape == (rows, 64)
        assert int4.dtype == int8.dtype == torch.int8
        assert int(int4.min()) >= -8 and int(int4.max()) <= 7 and int(int8.abs().max()) > 7
        assert linear.weight_scales.shape == (rows, 2)
        assert torch.equal(linear.bias, layer.weights[f"{name}.bias"])
        perm = layer.plan[name].perm
        assert (linear.perm is None) == (perm is None)
        assert perm is None or (linear.perm.dtype == torch.int32 and torch.equal(linear.perm.long(), perm))
        # int8 columns take up the errors of the int4 columns, so neither is just the float weight rounded
        weight = layer.plan[name].stored(layer.weights[f"{name}.weight"])
        assert 0.01 < float((stored_weight(result, name) - weight).norm() / weight.norm()) < 0.5


def test_gptq_beats_rounding_to_nearest_where_it_is_fitted(layer: Layer) -> None:
    """With activations unquantised, so that the weights alone make the error."""
    for stage in STAGES:
        for name in stage:
            rows, columns = layer.weights[f"{name}.weight"].shape
            layout = LinearLayout(rows, (Segment(columns, 16, 4),))
            layer.plan = {**layer.plan, name: LinearPlan(layout)}
    recipe = load_recipe("w4a16", {"group_size": 0})
    fitted, _ = layer.quantize(recipe)
    nearest, _ = layer.quantize(replace(recipe, rounding="rtn", scale_search=False))
    assert all(fitted.errors[name] < 0.8 * nearest.errors[name] for name in fitted.errors)
    assert nearest.damping == 0.0 and fitted.damping == recipe.damping
    down = layer.weights["mlp.down_proj.weight"]
    scale = down.abs().amax(1, keepdim=True) / 7
    codes = torch.round(down / scale).clamp(-8, 7)
    assert torch.equal(nearest.linears["mlp.down_proj"].weights[0], codes.to(torch.int8))
    torch.testing.assert_close(round_weight(down, layer.plan["mlp.down_proj"].layout), codes * scale)


LAYOUTS = [
    LinearLayout(6, (Segment(96, 4, 4),)),
    LinearLayout(6, (Segment(64, 4, 4), Segment(32, 8, 8)), clip=(0.8, 2.5)),
    LinearLayout(6, (Segment(64, 4, 4), Segment(32, 8, 4)), clip=(0.9, float("inf"))),
    LinearLayout(6, (Segment(64, 4, 4), Segment(32, 16, 16)), symmetric=False),
    LinearLayout(6, (Segment(96, 8, 8),), symmetric=False),
    LinearLayout(6, (Segment(32, 4, 4), Segment(32, 8, 8), Segment(32, 16, 16))),
    LinearLayout(6, (Segment(96, 16, 4),), group_size=32),
    LinearLayout(6, (Segment(64, 4, 4), Segment(32, 8, 8)), hadamard=32),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fake_quantisation_is_what_the_integer_product_computes(layout: LinearLayout) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(20, 96, generator=generator), torch.randn(6, 96, generator=generator)
    x[:, 70] *= 20
    x[3] = 0
    scales = layer_quantizer._scales(weight, None, layout)
    codes = layer_quantizer._round(weight, scales, layout)
    y = w4ax_gemm(quantize_activation(x, layout), codes, scales, layout)
    stored = stored_inputs(x, LinearPlan(layout))
    rounded = fake_quantize(stored, layout)
    torch.testing.assert_close(rounded @ round_weight(weight, layout).T, y, rtol=1e-4, atol=1e-4)
    assert torch.equal(rounded[3], torch.zeros(96))


def test_every_sequence_gives_a_sample_to_the_clip_search(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than sampled tokens: one token of each."""
    sizes: list[int] = []
    real = layer_quantizer.search_clip

    def spy(inputs: Tensor, *args: Any) -> tuple[float, float]:
        sizes.append(len(inputs))
        return real(inputs, *args)

    monkeypatch.setattr(layer_quantizer, "search_clip", spy)
    monkeypatch.setattr(layer_quantizer, "CLIP_TOKENS", 32)
    layer.quantize()
    assert sizes == [32] * 4
    sizes.clear()
    monkeypatch.setattr(layer_quantizer, "CLIP_TOKENS", 2)
    layer.quantize()
    assert sizes == [NUM_SEQUENCES] * 4


def test_fewer_tokens_than_channels_leave_a_singular_hessian_that_damping_mends(layer: Layer) -> None:
    layer.hidden = layer.hidden[:1, :16]
    result, hidden = layer.quantize()
    assert hidden.isfinite().all()
    assert DUAL.damping <= result.damping <= 1
    assert all(0 < error < 0.3 for error in result.errors.values())


def test_dead_channels_are_rounded_to_nearest(layer: Layer) -> None:
    dead = [0, 17, 100]
    layer.weights["input_layernorm.weight"][dead] = 0
    result, hidden = layer.quantize()
    assert hidden.isfinite().all()
    perm, linear = layer.plan["self_attn.q_proj"].perm, result.linears["self_attn.q_proj"]
    columns = [int((perm == channel).nonzero()) for channel in dead]
    weight = layer.plan["self_attn.q_proj"].stored(layer.weights["self_attn.q_proj.weight"])
    for column in columns:
        segment = int(column >= 64)
        codes, scale = linear.weights[segment], linear.weight_scales[:, segment]
        low, high = ((-8, 7), (-127, 127))[segment]
        expected = torch.round(weight[:, column] / scale).clamp(low, high)
        assert torch.equal(codes[:, column - 64 * segment].float(), expected)


@pytest.mark.parametrize("broken", ["hidden", "self_attn.v_proj.weight", "mlp.up_proj.weight"])
def test_what_is_not_finite_is_refused(broken: str, layer: Layer) -> None:
    if broken == "hidden":
        layer.hidden[2, 3, 4] = float("nan")
    else:
        layer.weights[broken][0, 0] = float("inf")
    with pytest.raises(NumericsError, match="not finite"):
        layer.quantize()


def test_an_overflow_in_the_middle_of_the_layer_is_refused(layer: Layer) -> None:
    """Weights and Hessians are finite one by one; gate times up is not."""
    for name in ("gate_proj", "up_proj"):
        layer.weights[f"mlp.{name}.weight"] *= 1e20
    with pytest.raises(NumericsError, match="activations"):
        layer.quantize()


def test_biases_are_part_of_the_stream(layer: Layer) -> None:
    """Without its bias o_proj gives another stream: the update uses what is stored, bias included."""
    _, with_bias = layer.quantize()
    bias = layer.weights.pop("mlp.down_proj.bias")
    _, without = layer.quantize()
    torch.testing.assert_close(with_bias - without, bias.expand_as(without), rtol=1e-3, atol=1e-4)
    assert F.relu(bias).sum() > 0
