"""One quantised linear and its tensors in a checkpoint: the writing half and the reading half face each other here.

Segments are not stored as such. They are the cuts of two runs over the stored channels laid side by side: activation
bits, which never fall along the stored order ([4 | 8 | 16], `.block_precision`), and weight kinds, in the order
[int4 | int8 | bf16], whose widths are those of `.weight_packed`, `.weight_int8` and `.weight_outlier`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError
from w4a4.export.finding import Finding, raise_first
from w4a4.export.quantization_config import LayoutRules
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.packing import pack_int4, unpack_int4

MAX_BLOCK = 128
FLOATS = ("BF16", "F16", "F32")
SUFFIXES = (
    "weight_packed", "weight_int8", "weight_outlier", "weight_scale", "block_precision", "act_clip", "input_perm",
    "weight_shape", "bias",
)  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """What a checkpoint declares about one tensor; None in `shape` is a size that other tensors decide."""

    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]
    is_required: bool = True


def linear_specs(out_features: int, in_features: int, has_bias: bool) -> dict[str, TensorSpec]:
    """Suffix -> dtype and shape of one packed linear's tensors (the table of docs, one row each).

    A bias may stand where the source has none: means taken off the cache fold into one.
    """
    return {
        "weight_packed": TensorSpec(("I32",), (out_features, None), False),
        "weight_int8": TensorSpec(("I8",), (out_features, None), False),
        "weight_outlier": TensorSpec(("BF16",), (out_features, None), False),
        "weight_scale": TensorSpec(("F32",), (out_features, None), False),
        "block_precision": TensorSpec(("U8",), (None,)),
        "act_clip": TensorSpec(("F32",), (2,)),
        "input_perm": TensorSpec(("I32",), (in_features,), False),
        "weight_shape": TensorSpec(("I64",), (2,)),
        "bias": TensorSpec(FLOATS, (out_features,), has_bias),
    }


@dataclass(frozen=True)
class WeightWidths:
    """Columns of each weight kind, in stored order."""

    int4: int = 0
    int8: int = 0
    bf16: int = 0

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> WeightWidths:
        """From the shapes of a linear's tensors, by suffix; all are known to be [N, columns]."""
        return cls(
            int4=shapes.get("weight_packed", (0, 0))[1] * 8,
            int8=shapes.get("weight_int8", (0, 0))[1],
            bf16=shapes.get("weight_outlier", (0, 0))[1],
        )

    @property
    def total(self) -> int:
        return self.int4 + self.int8 + self.bf16

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        return ((4, self.int4), (8, self.int8), (16, self.bf16))


@dataclass(frozen=True)
class PackedLinear:
    """One linear as stored, on the CPU.

    weights:       one per segment of `layout`: int8 codes [N, width] (unpacked), or bf16 outlier columns
    weight_scales: f32 [N, layout.num_scales]
    perm:          int32 [K] or None: stored channel j reads input channel perm[j]
    bias:          [N] or None
    """

    layout: LinearLayout
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    perm: Tensor | None
    bias: Tensor | None

    def to_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint for the linear named `prefix`.

        Raises:
            ValueError: a layout the format cannot hold, or weights that do not fit the layout.
            NumericsError: scales, clip, outliers or bias not finite, or scales not above zero.
        """
        layout = self.layout
        _check_representable(self, prefix)
        codes: dict[int, list[Tensor]] = {4: [], 8: [], 16: []}
        for segment, weight in zip(layout.segments, self.weights, strict=True):
            expected = torch.bfloat16 if segment.weight_bits == 16 else torch.int8
            if weight.dtype != expected or tuple(weight.shape) != (layout.out_features, segment.width):
                raise ValueError(
                    f"{prefix}: weight of a segment must be {expected} [{layout.out_features}, {segment.width}], "
                    f"got {weight.dtype} {list(weight.shape)}"
                )
            codes[segment.weight_bits].append(weight)
        bits = [segment.act_bits for segment in layout.segments for _ in range(segment.width)]
        block = _block_size([segment.width for segment in _activation_runs(layout)])
        tensors = {
            "block_precision": torch.tensor(bits[::block], dtype=torch.uint8),
            "act_clip": torch.tensor(layout.clip, dtype=torch.float32),
            "weight_shape": torch.tensor([layout.out_features, layout.in_features], dtype=torch.int64),
        }
        if codes[4]:
            tensors["weight_packed"] = pack_int4(torch.cat(codes[4], 1))
        if codes[8]:
            tensors["weight_int8"] = torch.cat(codes[8], 1)
        if codes[16]:
            tensors["weight_outlier"] = torch.cat(codes[16], 1)
        if layout.num_scales:
            tensors["weight_scale"] = self.weight_scales
        if self.perm is not None:
            tensors["input_perm"] = self.perm
        if self.bias is not None:
            tensors["bias"] = self.bias
        findings = value_findings(prefix, tensors, "")
        if findings:
            raise NumericsError(f"{findings[0]}", "the statistics or the source weights of this layer are degenerate")
        return {f"{prefix}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, prefix: str, tensors: Mapping[str, Tensor], rules: LayoutRules, file: str) -> PackedLinear:
        """The inverse of `to_tensors`: `tensors` by suffix, dtypes and shapes already checked, values checked here.

        Raises:
            CheckpointError: a permutation, map, scale, clip or shape that makes no sense.
            NumericsError: outliers or bias not finite.
        """
        shapes = {suffix: tuple(tensor.shape) for suffix, tensor in tensors.items()}
        raise_first(value_findings(prefix, tensors, file))
        layout = stored_layout(prefix, shapes, tensors["block_precision"], tensors["act_clip"], rules, file)
        parts = iter(_cut(layout, tensors))
        scales = tensors.get("weight_scale", torch.empty(layout.out_features, 0))
        return cls(layout, tuple(parts), scales, tensors.get("input_perm"), tensors.get("bias"))


def stored_layout(
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    block_precision: Tensor,
    act_clip: Tensor,
    rules: LayoutRules,
    file: str,
) -> LinearLayout:
    """The layout of a stored linear from its tensors' shapes (by suffix) and its two small tensors.

    Raises:
        CheckpointError: widths, map and number of scales do not fit together.
    """
    out_features = next(
        shapes[name][0] for name in ("weight_packed", "weight_int8", "weight_outlier") if name in shapes
    )
    widths = WeightWidths.of_shapes(shapes)
    in_features = widths.total
    raise_first(map_findings(prefix, widths, block_precision, file))
    block = in_features // len(block_precision)
    runs = tuple((bits, int((block_precision == bits).sum()) * block) for bits in (4, 8, 16))
    segments = _refine(runs, widths.runs)
    columns = shapes.get("weight_scale", (0, 0))[1]
    per_segment = sum(segment.weight_bits < 16 for segment in segments)
    group_size = 0
    if rules.has_group_scales and _may_have_groups(segments) and columns > 1:
        if in_features % columns:
            expected = f"a number of groups that divides {in_features}"
            raise_first([Finding(file, f"{prefix}.weight_scale", expected, f"{columns} columns")])
        group_size = in_features // columns
    elif columns != per_segment:
        expected = f"{per_segment} columns, one per integer segment"
        raise_first([Finding(file, f"{prefix}.weight_scale", expected, f"{columns} columns")])
    has_act4 = any(segment.act_bits == 4 for segment in segments)
    return LinearLayout(
        out_features,
        segments,
        clip=(float(act_clip[0]), float(act_clip[1])),
        symmetric=rules.is_symmetric or not has_act4,
        hadamard=rules.hadamard(prefix),
        group_size=group_size,
    )


def map_findings(prefix: str, widths: WeightWidths, block_precision: Tensor, file: str) -> list[Finding]:
    """What is wrong with a precision map: its values, their order, and what weights it allows under them."""
    name = f"{prefix}.block_precision"
    blocks = block_precision.tolist()
    wrong = [bits for bits in blocks if bits not in (4, 8, 16)]
    if wrong or not blocks:
        return [Finding(file, name, "activation bits 4, 8 or 16", str(wrong[0]) if wrong else "no block")]
    if blocks != sorted(blocks):
        return [Finding(file, name, "blocks in the order [4 | 8 | 16]", "blocks out of order")]
    if widths.total % len(blocks):
        return [Finding(file, name, f"a number of blocks that divides {widths.total}", f"{len(blocks)} blocks")]
    block = widths.total // len(blocks)
    act4, act16 = blocks.count(4) * block, blocks.count(16) * block
    findings = []
    if act4 > widths.int4:
        findings.append(Finding(file, name, f"at most {widths.int4} channels at 4 bits (the int4 weights)", str(act4)))
    if act16 < widths.bf16:
        expected = f"at least {widths.bf16} channels at 16 bits (the bf16 weights)"
        findings.append(Finding(file, name, expected, str(act16)))
    return findings


def value_findings(prefix: str, tensors: Mapping[str, Tensor], file: str) -> list[Finding]:
    """What is wrong with the values of one linear's tensors, by suffix; dtypes and ranks are already right."""
    findings: list[Finding] = []

    def found(suffix: str, expected: str, got: object) -> None:
        findings.append(Finding(file, f"{prefix}.{suffix}", expected, str(got)))

    widths = WeightWidths.of_shapes({suffix: tuple(tensor.shape) for suffix, tensor in tensors.items()})
    stored = next((tensors[s] for s in ("weight_packed", "weight_int8", "weight_outlier") if s in tensors), None)
    shape = tensors["weight_shape"].tolist()
    if stored is None or shape != [stored.shape[0], widths.total]:
        got_shape = "no weight" if stored is None else [stored.shape[0], widths.total]
        found("weight_shape", f"the (N, K) of the stored weights, {got_shape}", shape)
    findings += map_findings(prefix, widths, tensors["block_precision"], file)
    clip_factor, beta = tensors["act_clip"].tolist()
    if not (math.isfinite(clip_factor) and clip_factor > 0):
        found("act_clip", "a finite c > 0", f"c = {clip_factor}")
    if not beta > 0:
        found("act_clip", "beta > 0 (infinite: no rule)", f"beta = {beta}")
    if "weight_scale" in tensors:
        scales = tensors["weight_scale"]
        wrong = scales[~(torch.isfinite(scales) & (scales > 0))]
        if len(wrong):
            found("weight_scale", "finite scales > 0", f"{len(wrong)} others, the first {wrong[0].item()}")
    if "input_perm" in tensors:
        perm = tensors["input_perm"]
        outside = perm[(perm < 0) | (perm >= len(perm))]
        if len(outside):
            found("input_perm", f"channels 0 to {len(perm) - 1}", outside[0].item())
        elif len(torch.unique(perm)) != len(perm):
            found("input_perm", "every channel once", f"{len(perm) - len(torch.unique(perm))} repeated channels")
    for suffix in ("weight_outlier", "bias"):
        if suffix in tensors:
            findings += finite_findings(f"{prefix}.{suffix}", tensors[suffix], file)
    return findings


def finite_findings(name: str, tensor: Tensor, file: str) -> list[Finding]:
    """Whether a float tensor holds NaN or an infinity."""
    if bool(torch.isfinite(tensor).all()):
        return []
    return [Finding(file, name, "finite values", "NaN or infinity", is_numeric=True)]


def _refine(acts: Sequence[tuple[int, int]], weights: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Cut two partitions of the same channels, each (bits, width) in order, at the borders of both."""
    segments: list[Segment] = []
    act_queue, weight_queue = [list(run) for run in acts if run[1]], [list(run) for run in weights if run[1]]
    while act_queue and weight_queue:
        width = min(act_queue[0][1], weight_queue[0][1])
        segments.append(Segment(width, act_queue[0][0], weight_queue[0][0]))
        for queue in (act_queue, weight_queue):
            queue[0][1] -= width
            if not queue[0][1]:
                queue.pop(0)
    return tuple(segments)


def _cut(layout: LinearLayout, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """One weight tensor per segment, from the stored tensors."""
    stored: dict[int, Tensor] = {}
    if "weight_packed" in tensors:
        stored[4] = unpack_int4(tensors["weight_packed"])
    if "weight_int8" in tensors:
        stored[8] = tensors["weight_int8"]
    if "weight_outlier" in tensors:
        stored[16] = tensors["weight_outlier"]
    position = dict.fromkeys(stored, 0)
    parts = []
    for segment in layout.segments:
        start = position[segment.weight_bits]
        position[segment.weight_bits] = start + segment.width
        parts.append(stored[segment.weight_bits][:, start : start + segment.width].contiguous())
    return parts


def _activation_runs(layout: LinearLayout) -> list[Segment]:
    """Segments with neighbours of the same activation bits joined; only `width` and `act_bits` mean something."""
    runs: list[Segment] = []
    for segment in layout.segments:
        if runs and runs[-1].act_bits == segment.act_bits:
            runs[-1] = Segment(runs[-1].width + segment.width, segment.act_bits, runs[-1].weight_bits)
        else:
            runs.append(segment)
    return runs


def _block_size(widths: Sequence[int]) -> int:
    """The largest power of two up to 128 that divides every width."""
    block = MAX_BLOCK
    while any(width % block for width in widths):
        block //= 2
    return block


def _may_have_groups(segments: tuple[Segment, ...]) -> bool:
    return len(segments) == 1 and segments[0].act_bits == 16 and segments[0].weight_bits < 16


def _check_representable(linear: PackedLinear, prefix: str) -> None:
    """Raise ValueError unless the format gives this layout back as it is."""
    layout = linear.layout
    acts = [(run.act_bits, run.width) for run in _activation_runs(layout)]
    weights = [(bits, sum(s.width for s in layout.segments if s.weight_bits == bits)) for bits in (4, 8, 16)]
    if acts != sorted(acts, key=lambda run: run[0]) or _refine(acts, weights) != layout.segments:
        raise ValueError(
            f"{prefix}: neither activation nor weight bits may fall along the stored order, and segments of equal "
            f"bits are one; got {layout.segments}"
        )
    if weights[0][1] % 8:
        raise ValueError(f"{prefix}: the int4 part must be a multiple of 8 columns, got {weights[0][1]}")
    if layout.group_size and (not _may_have_groups(layout.segments) or layout.in_features % layout.group_size):
        raise ValueError(
            f"{prefix}: group scales need one segment with 16-bit activations and a group that divides "
            f"{layout.in_features}, got group {layout.group_size} and {layout.segments}"
        )
    expected = {
        "weight_scales": (linear.weight_scales, torch.float32, (layout.out_features, layout.num_scales)),
        "perm": (linear.perm, torch.int32, (layout.in_features,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
            raise ValueError(f"{prefix}: {name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    if linear.bias is not None and tuple(linear.bias.shape) != (layout.out_features,):
        raise ValueError(f"{prefix}: bias must be [{layout.out_features}], got {list(linear.bias.shape)}")
