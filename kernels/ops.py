"""The one door to the kernels: quantise an activation, multiply it with a quantised linear's weights.

`prepare_linear` and `fuse_linears` turn a stored linear into what a device computes with; the functions after them run
it. Which code runs is decided by the device in `backend_of` and nowhere else, and `path_of` says what it was. Each
tensor-level primitive is a PyTorch custom operator (`torch.ops.w4a4.*`) with a fake, which torch.compile sees; eager
calls go to the device's code directly, because an operator call costs tens of microseconds of a processor's time.

    quantized = quantize_activation(x, linear)                                            # attention output
    hidden, quantized = rmsnorm_quantize(x, residual, norm_weight, eps, linear)           # block input
    quantized = silu_mul_quantize(gate_up, linear)                                        # FFN
    y = linear_forward(quantized, linear)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from w4a4.kernels.layout import ActMode, LinearLayout, Segment
from w4a4.kernels.reference import QuantizedActivation

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class UnsupportedDeviceError(RuntimeError):
    """No kernels are written for this device; the message names those that have some."""


class StoredLinear(Protocol):
    """A linear as a checkpoint stores it: the arguments of `prepare_linear`."""

    @property
    def layout(self) -> LinearLayout: ...
    @property
    def weights(self) -> tuple[Tensor, ...]: ...
    @property
    def weight_scales(self) -> Tensor: ...
    @property
    def perm(self) -> Tensor | None: ...
    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True)
class RuntimeLinear:
    """One launch's worth of linear layers on one device. Made by `prepare_linear` or `fuse_linears`.

    layout:        segments, clip and transform; out_features counts every fused layer's rows
    out_sizes:     rows of each fused layer, in order: `y.split(linear.out_sizes, dim=1)`
    weights:       in the device's own layout (see the `prepare_weights` of `path`'s module)
    weight_scales: f32 [N, layout.num_scales]
    row_sums:      f32 [N, integer segments] where activations are asymmetric, else None
    perm:          int32 [K] or None: stored channel j reads input channel perm[j]
    bias:          f32 [N] or None
    path:          which code multiplies it
    code_columns:  of an activation that is quantised for it
    input_dtypes:  of activations before they are quantised
    """

    layout: LinearLayout
    out_sizes: tuple[int, ...]
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    row_sums: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    path: str
    code_columns: int
    input_dtypes: tuple[torch.dtype, ...]

    @property
    def device(self) -> torch.device:
        return self.weight_scales.device


def backend_of(device: torch.device | str) -> ModuleType:
    """The module whose functions run on `device`: `kernels.cpu`, or `kernels.sm90` on a Hopper GPU.

    Raises:
        UnsupportedDeviceError: nothing is written for this device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        from w4a4.kernels import cpu

        return cpu
    if device.type == "cuda":
        name, capability = _cuda_properties(device.index)
        if capability == (9, 0):
            from w4a4.kernels import sm90

            return sm90
        name = f"{name} (sm_{capability[0]}{capability[1]})"
    else:
        name = device.type
    raise UnsupportedDeviceError(
        f"no W4Ax kernels for {name}: they are written for sm_90 (H100, H200, GH200); "
        "the same checkpoint runs here on device 'cpu'"
    )


@cache
def _cuda_properties(index: int | None) -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)


def path_of(linear: RuntimeLinear) -> str:
    """What multiplies this linear, such as "reference-cpu" or "int8-wgmma sm_90 (w4a8)"."""
    return linear.path


def prepare_linear(
    layout: LinearLayout,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> RuntimeLinear:
    """Move one linear to `device` in the layout its kernels read.

    Args:
        layout: what is to run (`LinearLayout.at` has been applied if activations are forced to other bits).
        weights: one [N, width] tensor per segment in stored order: int8 codes, or float for 16-bit outlier columns.
        weight_scales: f32 [N, layout.num_scales].
        perm: int [K] or None. bias: [N] or None.

    Raises:
        ValueError: a shape or dtype that does not fit the layout.
        UnsupportedDeviceError: no kernels for `device`.
    """
    backend = backend_of(device)
    _check_stored(layout, weights, weight_scales, perm, bias)
    device = torch.device(device)
    scales = weight_scales.to(device).contiguous()
    held, row_sums = backend.prepare_weights(layout, weights, scales, bias, device)
    return RuntimeLinear(
        layout=layout,
        out_sizes=(layout.out_features,),
        weights=held,
        weight_scales=scales,
        row_sums=row_sums,
        perm=None if perm is None else perm.to(device, torch.int32).contiguous(),
        bias=None if bias is None else bias.to(device, torch.float32).contiguous(),
        path=backend.path(layout),
        code_columns=backend.code_columns(layout),
        input_dtypes=backend.ACTIVATION_DTYPES,
    )


def fuse_linears(
    linears: Sequence[StoredLinear], device: torch.device | str = "cpu", act: ActMode = "map"
) -> RuntimeLinear:
    """Prepare linears that read the same input (q, k, v; gate, up) as one, their rows one after the other.

    `act` forces activations to 8 or 16 bits. `RuntimeLinear.out_sizes` cuts the fused output apart again.

    Raises:
        ValueError: the linears do not share segments, clip, transform or permutation.
    """
    if not linears:
        raise ValueError("fuse_linears needs at least one linear")
    first = linears[0]
    for other in linears[1:]:
        for name in ("segments", "clip", "symmetric", "hadamard", "group_size"):
            ours, theirs = getattr(first.layout, name), getattr(other.layout, name)
            if ours != theirs:
                raise ValueError(f"linears that are fused must share {name}, got {ours} and {theirs}")
        same_perm = first.perm is other.perm or (
            first.perm is not None and other.perm is not None and torch.equal(first.perm, other.perm)
        )
        if not same_perm:
            raise ValueError("linears that are fused must share their input permutation, got two different ones")
    for one in linears:
        _check_stored(one.layout, one.weights, one.weight_scales, one.perm, one.bias)
    sizes = tuple(one.layout.out_features for one in linears)
    layout = replace(first.layout.at(act), out_features=sum(sizes))
    bias = None
    if any(one.bias is not None for one in linears):
        bias = torch.cat(
            [
                torch.zeros(size) if one.bias is None else one.bias.float()
                for one, size in zip(linears, sizes, strict=True)
            ]
        )
    fused = prepare_linear(
        layout,
        tuple(torch.cat(parts) for parts in zip(*(one.weights for one in linears), strict=True)),
        torch.cat([one.weight_scales for one in linears]),
        first.perm,
        bias,
        device,
    )
    return replace(fused, out_sizes=sizes)


def _check_stored(
    layout: LinearLayout,
    weights: tuple[Tensor, ...],
    weight_scales: Tensor,
    perm: Tensor | None,
    bias: Tensor | None,
) -> None:
    if len(weights) != len(layout.segments):
        raise ValueError(f"one weight per segment: got {len(weights)} for {len(layout.segments)} segments")
    for index, (segment, weight) in enumerate(zip(layout.segments, weights, strict=True)):
        expected = (layout.out_features, segment.width)
        if tuple(weight.shape) != expected:
            raise ValueError(f"weight of segment {index} must be {expected}, got {tuple(weight.shape)}")
        allowed = _FLOATS if segment.weight_bits == 16 else (torch.int8,)
        if weight.dtype not in allowed:
            raise ValueError(f"weight of segment {index} must be {_names(allowed)}, got {weight.dtype}")
        if layout.group_size and segment.act_bits != 16:
            raise ValueError("scales per group need 16-bit activations: integer segments have one scale per row")
    expected = (layout.out_features, layout.num_scales)
    if tuple(weight_scales.shape) != expected or weight_scales.dtype != torch.float32:
        raise ValueError(
            f"weight_scales must be float32 {expected}, got {weight_scales.dtype} {tuple(weight_scales.shape)}"
        )
    if perm is not None:
        if tuple(perm.shape) != (layout.in_features,) or perm.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"perm must be int [{layout.in_features}], got {perm.dtype} {tuple(perm.shape)}")
        if not torch.equal(perm.sort().values, torch.arange(layout.in_features, dtype=perm.dtype, device=perm.device)):
            raise ValueError(f"perm must hold each of 0 to {layout.in_features - 1} once")
    if bias is not None and tuple(bias.shape) != (layout.out_features,):
        raise ValueError(f"bias must be [{layout.out_features}], got {tuple(bias.shape)}")
    if layout.hadamard > 1 and layout.in_features % layout.hadamard:
        raise ValueError(f"block Hadamard of {layout.hadamard} does not divide {layout.in_features} input channels")


def quantize_activation(x: Tensor, linear: RuntimeLinear) -> QuantizedActivation:
    """Quantise x [T, K] (float32, bf16 or fp16) as `linear` wants it; codes and scales in the device's layout."""
    _check_activation("x", x, linear.layout.in_features, linear)
    if not torch.compiler.is_compiling():
        eager: QuantizedActivation = backend_of(x.device).quantize(x, linear.layout, linear.perm)
        return eager
    geometry, clip = _encoded(linear.layout)
    return _activation(_quantize(x, linear.perm, geometry, clip), linear.layout)


def rmsnorm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, linear: RuntimeLinear
) -> tuple[Tensor, QuantizedActivation]:
    """Add `residual` [T, K] to x [T, K] if given, RMSNorm (times `weight` [K] if given), quantise.

    Returns: the sum before the norm (the new residual stream, in x's dtype) and the quantised activation.
    """
    width = linear.layout.in_features
    _check_activation("x", x, width, linear)
    if residual is not None:
        _check_activation("residual", residual, width, linear)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"residual must be {x.dtype} {tuple(x.shape)} as x, got {residual.dtype} {tuple(residual.shape)}"
            )
    if weight is not None:
        got, expected = (weight.dtype, tuple(weight.shape), weight.device), (x.dtype, (width,), x.device)
        if got != expected:
            raise ValueError("norm weight must be {} {} on {}, got {} {} on {}".format(*expected, *got))
    if not torch.compiler.is_compiling():
        backend = backend_of(x.device)
        eager: tuple[Tensor, QuantizedActivation] = backend.rmsnorm_quantize(
            x, residual, weight, eps, linear.layout, linear.perm
        )
        return eager
    geometry, clip = _encoded(linear.layout)
    hidden, *quantized = _rmsnorm_quantize(x, residual, weight, eps, linear.perm, geometry, clip)
    return (x if residual is None else hidden), _activation(quantized, linear.layout)


def silu_mul_quantize(gate_up: Tensor, linear: RuntimeLinear) -> QuantizedActivation:
    """silu(gate) * up of gate_up [T, 2K] = [gate | up], then quantise for `linear` (the down projection)."""
    _check_activation("gate_up", gate_up, 2 * linear.layout.in_features, linear)
    if not torch.compiler.is_compiling():
        eager: QuantizedActivation = backend_of(gate_up.device).silu_mul_quantize(gate_up, linear.layout, linear.perm)
        return eager
    geometry, clip = _encoded(linear.layout)
    return _activation(_silu_mul_quantize(gate_up, linear.perm, geometry, clip), linear.layout)


def linear_forward(activation: QuantizedActivation, linear: RuntimeLinear) -> Tensor:
    """y = x Wᵀ + b of an activation quantised for `linear`: [T, N], float32 on a CPU and bf16 on a GPU."""
    layout = linear.layout
    codes, columns = activation.codes, linear.code_columns
    if codes.device != linear.device:
        raise ValueError(f"activation is on {codes.device}, the linear on {linear.device}")
    if codes.ndim != 2 or codes.shape[1] != columns or codes.dtype != torch.int8 or not codes.is_contiguous():
        raise ValueError(f"codes must be contiguous int8 [T, {columns}], got {codes.dtype} {tuple(codes.shape)}")
    tokens, segments = codes.shape[0], _integer_segments(layout)
    if tuple(activation.scales.shape) != (tokens, segments) or activation.scales.dtype != torch.float32:
        raise ValueError(
            f"scales must be float32 [{tokens}, {segments}], got {activation.scales.dtype} "
            f"{tuple(activation.scales.shape)}"
        )
    if (activation.zeros is not None) != (segments > 0 and not layout.symmetric):
        raise ValueError("zero points come with an asymmetric layout and only with one")
    kept = _unquantized_columns(layout)
    rest = activation.unquantized
    if (0 if rest is None else rest.shape[1]) != kept:
        raise ValueError(f"unquantized must be [T, {kept}], got {None if rest is None else tuple(rest.shape)}")
    y: Tensor
    if not torch.compiler.is_compiling():
        y = backend_of(codes.device).linear(
            activation, linear.weights, linear.weight_scales, linear.row_sums, linear.bias, layout
        )
        return y
    geometry, _ = _encoded(layout)
    y = _linear(
        codes,
        activation.scales,
        activation.zeros,
        rest,
        list(linear.weights),
        linear.weight_scales,
        linear.row_sums,
        linear.bias,
        geometry,
    )
    return y


def _check_activation(name: str, x: Tensor, width: int, linear: RuntimeLinear) -> None:
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"{name} must be [T, {width}], got {list(x.shape)}")
    if x.dtype not in linear.input_dtypes:
        raise ValueError(f"{name} must be {_names(linear.input_dtypes)} on {linear.device.type}, got {x.dtype}")
    if x.device != linear.device:
        raise ValueError(f"{name} is on {x.device}, the linear on {linear.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()} for shape {list(x.shape)}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _integer_segments(layout: LinearLayout) -> int:
    return sum(segment.act_bits < 16 for segment in layout.segments)


def _unquantized_columns(layout: LinearLayout) -> int:
    return sum(segment.width for segment in layout.segments if segment.act_bits == 16)


def _activation(tensors: Sequence[Tensor], layout: LinearLayout) -> QuantizedActivation:
    codes, scales, zeros, rest = tensors
    return QuantizedActivation(
        codes=codes,
        scales=scales,
        zeros=zeros if zeros.shape[1] else None,
        unquantized=rest if _unquantized_columns(layout) else None,
    )


# A custom operator takes tensors and plain numbers, so a layout crosses it as two lists.


def _encoded(layout: LinearLayout) -> tuple[list[int], list[float]]:
    numbers = [layout.out_features, int(layout.symmetric), layout.hadamard, layout.group_size]
    for segment in layout.segments:
        numbers += [segment.width, segment.act_bits, segment.weight_bits]
    return numbers, list(layout.clip)


@lru_cache(maxsize=4096)
def _decoded(geometry: tuple[int, ...], clip: tuple[float, ...] = (1.0, float("inf"))) -> LinearLayout:
    out_features, symmetric, hadamard, group_size, *rest = geometry
    segments = tuple(Segment(*rest[i : i + 3]) for i in range(0, len(rest), 3))
    return LinearLayout(out_features, segments, (clip[0], clip[1]), bool(symmetric), hadamard, group_size)


def _flat(activation: QuantizedActivation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An operator returns tensors only: what is absent becomes [T, 0]."""
    empty = activation.scales.new_empty(activation.scales.shape[0], 0)
    zeros = empty if activation.zeros is None else activation.zeros
    rest = activation.unquantized
    return activation.codes, activation.scales, zeros, empty.clone() if rest is None else rest.clone()


def _fake_activation(x: Tensor, layout: LinearLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, backend, segments = x.shape[0], backend_of(x.device), _integer_segments(layout)
    kept = _unquantized_columns(layout)
    dtype = backend.OUT_DTYPE if kept else torch.float32
    return (
        x.new_empty(tokens, backend.code_columns(layout), dtype=torch.int8),
        x.new_empty(tokens, segments, dtype=torch.float32),
        x.new_empty(tokens, 0 if layout.symmetric else segments, dtype=torch.float32),
        x.new_empty(tokens, kept, dtype=dtype),
    )


@torch.library.custom_op("w4a4::quantize_activation", mutates_args=())
def _quantize(
    x: Tensor, perm: Tensor | None, geometry: Sequence[int], clip: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = _decoded(tuple(geometry), tuple(clip))
    return _flat(backend_of(x.device).quantize(x, layout, perm))


@_quantize.register_fake
def _(
    x: Tensor, perm: Tensor | None, geometry: Sequence[int], clip: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_activation(x, _decoded(tuple(geometry), tuple(clip)))


@torch.library.custom_op("w4a4::rmsnorm_quantize", mutates_args=())
def _rmsnorm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    perm: Tensor | None,
    geometry: Sequence[int],
    clip: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first result is x + residual, or empty where there is no residual."""
    layout = _decoded(tuple(geometry), tuple(clip))
    hidden, activation = backend_of(x.device).rmsnorm_quantize(x, residual, weight, eps, layout, perm)
    return (x.new_empty(0) if residual is None else hidden, *_flat(activation))


@_rmsnorm_quantize.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    perm: Tensor | None,
    geometry: Sequence[int],
    clip: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden = x.new_empty(0) if residual is None else torch.empty_like(x)
    return hidden, *_fake_activation(x, _decoded(tuple(geometry), tuple(clip)))


@torch.library.custom_op("w4a4::silu_mul_quantize", mutates_args=())
def _silu_mul_quantize(
    gate_up: Tensor, perm: Tensor | None, geometry: Sequence[int], clip: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = _decoded(tuple(geometry), tuple(clip))
    return _flat(backend_of(gate_up.device).silu_mul_quantize(gate_up, layout, perm))


@_silu_mul_quantize.register_fake
def _(
    gate_up: Tensor, perm: Tensor | None, geometry: Sequence[int], clip: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_activation(gate_up, _decoded(tuple(geometry), tuple(clip)))


@torch.library.custom_op("w4a4::w4ax_gemm", mutates_args=())
def _linear(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    unquantized: Tensor | None,
    weights: Sequence[Tensor],
    weight_scales: Tensor,
    row_sums: Tensor | None,
    bias: Tensor | None,
    geometry: Sequence[int],
) -> Tensor:
    activation = QuantizedActivation(codes, scales, zeros, unquantized)
    backend, layout = backend_of(codes.device), _decoded(tuple(geometry))
    y: Tensor = backend.linear(activation, tuple(weights), weight_scales, row_sums, bias, layout)
    return y


@_linear.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    unquantized: Tensor | None,
    weights: Sequence[Tensor],
    weight_scales: Tensor,
    row_sums: Tensor | None,
    bias: Tensor | None,
    geometry: Sequence[int],
) -> Tensor:
    return codes.new_empty(codes.shape[0], geometry[0], dtype=backend_of(codes.device).OUT_DTYPE)
