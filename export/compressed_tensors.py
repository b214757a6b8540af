"""`w4a4 export --format compressed-tensors`: the integer weights in a format that vLLM and transformers read.

It knows one scheme per linear: one width of weights with one scale per row or group, and activations that are not
quantised or have 8 bits with one scale per token. What does not fit is not approximated: it is named, and refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.configs.errors import UnsupportedError
from w4a4.export.checkpoint import PackedCheckpoint, PackedLinear
from w4a4.export.plain_folder import TensorParts, write_plain_folder
from w4a4.kernels.layout import ActMode, LinearLayout
from w4a4.kernels.packing import pack_int4

_SCHEMES = {(16, 4): "W4A16", (16, 8): "W8A16", (8, 8): "W8A8"}
"""(activation, weight) bits that readers run."""


@dataclass(frozen=True)
class Scheme:
    """What compressed-tensors says about one linear. group_size 0: one scale per row."""

    act_bits: int
    weight_bits: int
    group_size: int

    @property
    def format(self) -> str:
        return "pack-quantized" if self.act_bits == 16 else "int-quantized"

    def to_json(self, targets: Sequence[str]) -> dict[str, Any]:
        """The entry of `config_groups`."""
        common = {"type": "int", "symmetric": True, "block_structure": None, "actorder": None}
        weights = common | {
            "num_bits": self.weight_bits,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size or None,
            "dynamic": False,
            "observer": "minmax",
        }
        inputs = common | {"num_bits": 8, "strategy": "token", "group_size": None, "dynamic": True, "observer": None}
        return {
            "targets": list(targets),
            "format": self.format,
            "weights": weights,
            "input_activations": inputs if self.act_bits == 8 else None,
            "output_activations": None,
        }


def losses(layout: LinearLayout) -> list[str]:
    """What of a linear (its activations already forced by `LinearLayout.at`) the format cannot hold, in words."""
    found = []
    segments = layout.segments
    if any(segment.act_bits == 4 for segment in segments):
        scale = "min(c * absmax, beta * rms) / 7" if layout.symmetric else "(max - min) / 15 with a zero point"
        found.append(f"4-bit activations scaled by {scale}")
    if len({segment.weight_bits for segment in segments}) > 1:
        widths = " + ".join(f"{s.width} of {s.weight_bits} bits" for s in segments)
        found.append(f"weights of two precisions ({widths})")
    elif len(segments) > 1:
        found.append(f"one weight scale per row in each of {len(segments)} segments")
    if segments[-1].weight_bits == 16:
        found.append("columns kept in 16 bits")
    if layout.hadamard > 1:
        found.append(f"the online Hadamard of {layout.hadamard} channels")
    if not found and (segments[0].act_bits, segments[0].weight_bits) not in _SCHEMES:
        found.append(f"int{segments[0].weight_bits} weights under {segments[0].act_bits}-bit activations")
    return found


def export_compressed_tensors(checkpoint: PackedCheckpoint, output: Path, act: ActMode = "map") -> Path:
    """Write the checkpoint to `output` in compressed-tensors' format.

    Args:
        act: activations that the folder asks of its reader: the checkpoint's, or all at 8 bits or unquantised.
    Raises:
        UnsupportedError: something would be lost; the message says what, and in which linears.
        UsageError, ResourceError: see `write_plain_folder`.
    """
    layouts = {prefix: checkpoint.layout(prefix).at(act) for prefix in checkpoint.linear_names}
    _refuse_losses(layouts)
    schemes = {prefix: _scheme(layout) for prefix, layout in layouts.items()}
    config = {key: value for key, value in checkpoint.hf_config.items() if key != "quantization_config"}
    formats = {scheme.format for scheme in schemes.values()}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{index}": scheme.to_json(_targets(scheme, schemes))
            for index, scheme in enumerate(sorted(set(schemes.values()), key=lambda scheme: scheme.weight_bits))
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    names = ", ".join(sorted({_SCHEMES[scheme.act_bits, scheme.weight_bits] for scheme in schemes.values()}))
    card = (
        f"# {checkpoint.path.resolve().name}, in the format of compressed-tensors\n\n"
        f"The integer weights of a w4a4 checkpoint (recipe {checkpoint.quantization['recipe']}), unchanged: {names}. "
        "The KV cache is the reader's own.\n"
    )
    return write_plain_folder(checkpoint, output, config, _tensors(checkpoint, schemes), card)


def _refuse_losses(layouts: Mapping[str, LinearLayout]) -> None:
    lost: dict[str, list[str]] = {}
    for prefix, layout in layouts.items():
        for loss in losses(layout):
            lost.setdefault(loss, []).append(prefix)
    if not lost:
        return
    lines = [f"{what} ({_named(prefixes)})" for what, prefixes in lost.items()]
    if all(not losses(layout.at("a16")) for layout in layouts.values()):
        hint = "--act a16 exports the weights alone"
    else:
        hint = "--format fake-quant for evaluation, or quantise with recipe w4a16 or w8a8"
    raise UnsupportedError(f"compressed-tensors cannot hold {'; '.join(lines)}", hint)


def _named(prefixes: Sequence[str]) -> str:
    """Short names of the linears, each with the number of layers it concerns."""
    counts: dict[str, int] = {}
    for prefix in prefixes:
        short = prefix.rpartition(".")[2]
        counts[short] = counts.get(short, 0) + 1
    return ", ".join(f"{name} of {count} layers" for name, count in counts.items())


def _scheme(layout: LinearLayout) -> Scheme:
    (segment,) = layout.segments
    return Scheme(segment.act_bits, segment.weight_bits, layout.group_size)


def _targets(scheme: Scheme, schemes: Mapping[str, Scheme]) -> list[str]:
    """All linears if they are alike, else the names of those that have the scheme."""
    if set(schemes.values()) == {scheme}:
        return ["Linear"]
    return [prefix for prefix, other in schemes.items() if other == scheme]


def _tensors(checkpoint: PackedCheckpoint, schemes: Mapping[str, Scheme]) -> TensorParts:
    for name in sorted(checkpoint.names()):
        if name.rpartition(".")[0] not in schemes and not name.endswith(".k_mean"):
            yield {name: checkpoint.tensor(name)}
    for prefix, scheme in schemes.items():
        yield dict(_linear_tensors(prefix, checkpoint.linear(prefix), scheme))


def _linear_tensors(prefix: str, linear: PackedLinear, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    linear = _input_order(linear)
    codes = torch.cat(linear.weights, 1)
    if scheme.format == "int-quantized":
        yield f"{prefix}.weight", codes
    else:
        yield f"{prefix}.weight_packed", pack_int4(codes) if scheme.weight_bits == 4 else _pack_int8(codes)
        yield f"{prefix}.weight_shape", torch.tensor(codes.shape, dtype=torch.int64)
    yield f"{prefix}.weight_scale", linear.weight_scales
    if linear.bias is not None:
        yield f"{prefix}.bias", linear.bias


def _input_order(linear: PackedLinear) -> PackedLinear:
    """The linear with its columns in the order of its input: one scale per row, so codes move freely."""
    if linear.perm is None:
        return linear
    (stored,) = linear.weights
    codes = torch.empty_like(stored)
    codes[:, linear.perm.long()] = stored
    return replace(linear, weights=(codes,), perm=None)


def _pack_int8(codes: Tensor) -> Tensor:
    """int8 codes [N, K] to words [N, K / 4], u = q + 128, the first code in the lowest byte."""
    return (codes.to(torch.int16) + 128).to(torch.uint8).contiguous().view(torch.int32)
