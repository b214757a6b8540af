"""Quantise one decoder layer on the inputs that the already quantised layers before it produce (true-sequential GPTQ).

Four stages, each on the outputs of the one before: q/k/v, o, gate/up, down. Linears that read the same input share
one Hessian and are rounded together. Knows nothing of files; weights arrive already transformed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from w4a4.calibrate.decoder import LayerMath, sequences_at_a_time
from w4a4.calibrate.statistics import token_weights_by_sequence
from w4a4.configs.errors import NumericsError
from w4a4.configs.recipe import Recipe
from w4a4.export.activation_clip import search_clip
from w4a4.export.checkpoint import PackedLinear
from w4a4.export.gptq import assemble, gptq
from w4a4.export.plan import LayerPlan, LinearPlan
from w4a4.export.rounding import group_scales, round_to_nearest, row_scales
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.reference import block_hadamard, quantize_activation

STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
CLIP_TOKENS = 512


@dataclass(frozen=True)
class LayerResult:
    """linears: by short name. errors: by short name, E‖y_q − y‖² / E‖y‖² on the stage's own inputs, with activation
    and weight quantisation. damping: the largest that GPTQ needed."""

    linears: dict[str, PackedLinear]
    errors: dict[str, float]
    damping: float


def stored_inputs(x: Tensor, plan: LinearPlan) -> Tensor:
    """Inputs x [T, K] in the order and basis in which the linear's weight is stored."""
    if plan.perm is not None:
        x = x.index_select(-1, plan.perm.to(x.device))
    return block_hadamard(x, plan.layout.hadamard)


def fake_quantize(stored: Tensor, layout: LinearLayout) -> Tensor:
    """What the integer activations stand for: `stored` [T, K] rounded as `kernels.reference` rounds it, as float."""
    plain = replace(layout, hadamard=1)
    activation = quantize_activation(stored, plain)
    parts, start, rest = [], 0, 0
    index = 0
    for segment in layout.segments:
        if segment.act_bits == 16:
            assert activation.unquantized is not None
            parts.append(activation.unquantized[:, rest : rest + segment.width].float())
            rest += segment.width
            continue
        codes = activation.codes[:, start : start + segment.width].float()
        if activation.zeros is not None:
            codes = codes - activation.zeros[:, index, None]
        parts.append(codes * activation.scales[:, index, None])
        start += segment.width
        index += 1
    return torch.cat(parts, 1)


class _StageInputs:
    """The second moment of a stage's inputs in stored order, and a sample of them for the clip search."""

    def __init__(self, plan: LinearPlan, device: torch.device | str, sample_every: int) -> None:
        self.plan = plan
        width = plan.layout.in_features
        self.hessian = torch.zeros(width, width, device=device)
        self.samples: list[Tensor] = []
        self.sample_every = sample_every
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """x [B, T, K], input channels in the model's order."""
        stored = stored_inputs(x, self.plan).float()
        if not stored.isfinite().all():
            raise NumericsError("activations of the calibration text are not finite", "check the source's weights")
        self.samples.append(stored[:, self.sample_every // 2 :: self.sample_every].flatten(0, 1))
        weighted = (stored * token_weights_by_sequence(stored).sqrt().unsqueeze(-1)).flatten(0, 1)
        self.hessian.addmm_(weighted.T, weighted)
        self.tokens += weighted.shape[0]

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.hessian.div_(self.tokens), torch.cat(self.samples)


def _quantize_stage(
    names: tuple[str, ...], weights: dict[str, Tensor], plan: LayerPlan, inputs: _StageInputs, recipe: Recipe
) -> tuple[dict[str, PackedLinear], dict[str, Tensor], dict[str, float], float]:
    """Round the linears of one stage. Returns packed linears, their float weights in stored order, errors, damping."""
    hessian, sample = inputs.finish()
    layout = plan[names[0]].layout
    stacked = torch.cat([plan[name].stored(weights[name + ".weight"]) for name in names])
    if recipe.clip_search and any(segment.act_bits == 4 for segment in layout.segments):
        layout = replace(layout, clip=search_clip(sample, stacked, layout))
    scales = _scales(stacked, hessian.diagonal() if recipe.scale_search else None, layout)
    if recipe.rounding == "gptq":
        result = gptq(stacked, hessian, scales, layout.segments, damping=recipe.damping, group_size=layout.group_size)
        codes, damping = result.codes, result.damping
    else:
        codes, damping = _round(stacked, scales, layout), 0.0
    dequantized = assemble(codes, scales, layout.segments, layout.group_size)

    rounded = fake_quantize(sample, layout)
    linears, floats, errors, start = {}, {}, {}, 0
    for name in names:
        rows = plan[name].layout.out_features
        part = slice(start, start + rows)
        exact, approximate = sample @ stacked[part].T, rounded @ dequantized[part].T
        energy = float(exact.square().sum())
        errors[name] = float((approximate - exact).square().sum()) / energy if energy else 0.0
        perm = plan[name].perm
        linears[name] = PackedLinear(
            layout=replace(layout, out_features=rows),
            weights=tuple(code[part].cpu().contiguous() for code in codes),
            weight_scales=scales[part].cpu().contiguous(),
            perm=None if perm is None else perm.to(torch.int32).cpu(),
            bias=None if (bias := weights.get(name + ".bias")) is None else bias.cpu(),
        )
        floats[name] = dequantized[part]
        start += rows
    return linears, floats, errors, damping


def _scales(weight: Tensor, diagonal: Tensor | None, layout: LinearLayout) -> Tensor:
    """Weight scales f32 [N, layout.num_scales]; searched for under `diagonal` (of the Hessian, [K]) if given."""
    search = diagonal is not None
    if layout.group_size:
        return group_scales(weight, layout.segments[0].weight_bits, layout.group_size, diagonal, search)
    columns, start = [], 0
    for segment in layout.segments:
        part = slice(start, start + segment.width)
        start += segment.width
        if segment.weight_bits < 16:
            importance = None if diagonal is None else diagonal[part]
            columns.append(row_scales(weight[:, part], segment.weight_bits, importance, search))
    return torch.stack(columns, 1) if columns else weight.new_empty(weight.shape[0], 0)  # narrow: all outliers


def round_weight(weight: Tensor, layout: LinearLayout) -> Tensor:
    """`weight` [N, K] (stored order) rounded to nearest at absmax scales, as float: a cheap stand-in for GPTQ."""
    scales = _scales(weight, None, layout)
    return assemble(_round(weight, scales, layout), scales, layout.segments, layout.group_size)


def _round(weight: Tensor, scales: Tensor, layout: LinearLayout) -> tuple[Tensor, ...]:
    parts, start, index = [], 0, 0
    for segment in layout.segments:
        part = weight[:, start : start + segment.width]
        start += segment.width
        if segment.weight_bits == 16:
            parts.append(part.bfloat16())
            continue
        scale = scales if layout.group_size else scales[:, index]
        parts.append(round_to_nearest(part, scale, segment.weight_bits))
        index += 1
    return tuple(parts)


def quantize_layer(
    math: LayerMath,
    weights: dict[str, Tensor],
    plan: LayerPlan,
    hidden: Tensor,
    recipe: Recipe,
    device: torch.device | str = "cpu",
) -> LayerResult:
    """Quantise a layer and advance `hidden` f32 [samples, T, H] through it, in place.

    Args:
        weights: the layer's transformed float weights by short name, on `device` as `hidden` is.
    Raises:
        NumericsError: activations or Hessian not finite.
    """
    run = _LayerRun(math, weights, plan, hidden, recipe, device)
    run.quantize()
    return LayerResult(run.linears, run.errors, run.damping)


class _LayerRun:
    def __init__(self, math: LayerMath, weights: dict[str, Tensor], plan: LayerPlan, hidden: Tensor, recipe: Recipe,
                 device: torch.device | str) -> None:  # fmt: skip
        self.math, self.weights, self.plan, self.hidden, self.recipe, self.device = (
            math, weights, plan, hidden, recipe, device,
        )  # fmt: skip
        self.linears: dict[str, PackedLinear] = {}
        self.floats: dict[str, Tensor] = {}
        self.errors: dict[str, float] = {}
        self.damping = 0.0
        self.together = sequences_at_a_time(math.config, hidden.shape[1], device)

    def quantize(self) -> None:
        qkv, o, gate_up, down = STAGES
        self._stage(qkv, self._rows(self._attention_input))
        self._stage(o, self._rows(self._attended))
        self._update(lambda x: self._linear("self_attn.o_proj", self._attended(x)))
        self._stage(gate_up, self._rows(self._mlp_input))
        self._stage(down, self._rows(self._mlp_hidden))
        self._update(lambda x: self._linear("mlp.down_proj", self._mlp_hidden(x)))

    def _stage(self, names: tuple[str, ...], rows: Iterator[Tensor]) -> None:
        sequences, length = self.hidden.shape[:2]
        every = min(max(1, sequences * length // CLIP_TOKENS), length)
        inputs = _StageInputs(self.plan[names[0]], self.device, every)
        for x in rows:
            inputs.add(x)
        linears, floats, errors, damping = _quantize_stage(names, self.weights, self.plan, inputs, self.recipe)
        self.linears |= linears
        self.floats |= floats
        self.errors |= errors
        self.damping = max(self.damping, damping)

    def _rows(self, function: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        for rows in torch.split(self.hidden, self.together):
            yield function(rows)

    def _update(self, function: Callable[[Tensor], Tensor]) -> None:
        for rows in torch.split(self.hidden, self.together):
            rows += function(rows)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """A quantised linear of the layer on float activations [B, T, K]."""
        plan = self.plan[name]
        return F.linear(stored_inputs(x, plan), self.floats[name], self.weights.get(name + ".bias"))

    def _attention_input(self, x: Tensor) -> Tensor:
        return self.math.norm(x) * self.weights["input_layernorm.weight"]

    def _attended(self, x: Tensor) -> Tensor:
        inputs = self._attention_input(x)
        q, k, v = (self._linear(name, inputs) for name in STAGES[0])
        return self.math.attend(*self.math.heads(self.weights, q, k, v))

    def _mlp_input(self, x: Tensor) -> Tensor:
        return self.math.norm(x) * self.weights["post_attention_layernorm.weight"]

    def _mlp_hidden(self, x: Tensor) -> Tensor:
        inputs = self._mlp_input(x)
        return F.silu(self._linear("mlp.gate_proj", inputs)) * self._linear("mlp.up_proj", inputs)
