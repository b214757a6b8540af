"""Packed linears in vLLM: what is loaded, how it is prepared, how it runs.

vLLM merges q, k, v and gate, up and cuts them between ranks by rows. o and down it cuts along their input, and adds up
what the ranks make of their slices. A token's scale is that of its whole input, so here ranks gather the input, take
rows of o and down as well, and gather the output: every digit is that of one rank. With `per_rank_scales` they keep
vLLM's way: a rank has its columns (`input_slice`) and scales of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import BasevLLMParameter, ChannelQuantScaleParameter

from w4a4.configs.errors import CheckpointError, UnsupportedError
from w4a4.export.checkpoint import PackedCheckpoint
from w4a4.kernels import ops
from w4a4.kernels.layout import LinearLayout
from w4a4.serve.integrations.input_slice import InputSlice, segment_weights
from w4a4.serve.integrations.vllm.parameters import IgnoredParameter, SharedParameter, weight_parameter
from w4a4.serve.integrations.vllm.settings import PluginSettings
from w4a4.serve.model_runner import choose_act

BIAS = "packed_bias"
"""Where biases are loaded: a mean taken off the values leaves one where vLLM's own model has none."""
_WEIGHTS = ("weight_packed", "weight_int8", "weight_outlier", "weight_scale")


@register_weight_loader_v2_supported_method
class W4A4LinearMethod(LinearMethodBase):
    """One (merged) linear of vLLM.

    Args:
        members: prefixes of the stored linears it is made of, in order of rows; they share their input.
    """

    def __init__(self, checkpoint: PackedCheckpoint, members: list[str], settings: PluginSettings) -> None:
        self.checkpoint, self.members, self.settings = checkpoint, members, settings
        self.cut: InputSlice | None = None
        self.is_gathered = False

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs["weight_loader"]
        first = self.members[0]
        layout = self.checkpoint.layout(first)
        stored = {suffix: tensor.dtype for suffix, tensor in self.checkpoint.linear_tensors(first).items()}
        rows = sum(output_partition_sizes)
        if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
            if self.settings.per_rank_scales:
                perm = self.checkpoint.tensor(f"{first}.input_perm") if "input_perm" in stored else None
                self.cut = InputSlice.of(layout, perm, layer.tp_rank, layer.tp_size)
                layout = self.cut.layout
            else:
                assert layer.reduce_results, "vLLM expects sums from this layer that somebody else completes"
                self.is_gathered, rows, loader = True, rows // layer.tp_size, load_own_rows
        cut = self.cut
        self.layout = replace(layout, out_features=rows)
        for suffix, data in _empty_tensors(self.layout, rows).items():
            if suffix in stored:  # without a column where none of them is this rank's
                layer.register_parameter(suffix, weight_parameter(suffix, data, cut, loader))
        if "input_perm" in stored and cut is None:
            order = torch.arange(input_size, dtype=torch.int32)
            layer.register_parameter("input_perm", SharedParameter(data=order, weight_loader=loader))
        for suffix in ("block_precision", "act_clip", "weight_shape", *(["input_perm"] if cut else [])):
            if suffix in stored:
                data = torch.empty(0, dtype=stored[suffix])
                layer.register_parameter(suffix, IgnoredParameter(data=data, weight_loader=loader))
        bias = torch.zeros(rows, dtype=torch.float32)
        layer.register_parameter(
            BIAS,
            SharedParameter(data=bias, weight_loader=loader)
            if cut
            else ChannelQuantScaleParameter(data=bias, weight_loader=loader, output_dim=0),
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make from the loaded tensors what the device computes with, and drop them.

        Raises:
            CheckpointError: scales that are not finite and positive.
            UnsupportedError: no kernels for the device.
        """
        device = getattr(layer, BIAS).device
        loaded = {
            name: _plain(getattr(layer, name)) for name in (*_WEIGHTS, BIAS, "input_perm") if hasattr(layer, name)
        }
        stored = {suffix: loaded[suffix] for suffix in _WEIGHTS if suffix in loaded}
        scales = stored.get("weight_scale", torch.empty(self.layout.out_features, 0, dtype=torch.float32))
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise CheckpointError(f"{self.members[0]}: weight scales must be finite and > 0", "w4a4 verify DIR")
        perm = self.cut.perm if self.cut else loaded.get("input_perm")
        is_added_here = self.cut is None or layer.tp_rank == 0  # once, where ranks add up
        bias = loaded[BIAS] if is_added_here and bool(loaded[BIAS].any()) else None
        act = choose_act(self.settings.act, device)
        try:
            layer.packed = ops.prepare_linear(
                self.layout.at(act), segment_weights(self.layout, stored), scales, perm, bias, device
            )
        except ops.UnsupportedDeviceError as error:
            raise UnsupportedError(str(error), "vLLM's CPU build runs it without a GPU") from error
        for name in (*_WEIGHTS, BIAS, "input_perm", "block_precision", "act_clip", "weight_shape"):
            if hasattr(layer, name):
                delattr(layer, name)
        if self.is_gathered:
            layer.reduce_results = False  # nothing is left to add up

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [..., N] of x [..., K] in x's dtype. vLLM's own bias is not used: ours is inside."""
        linear: ops.RuntimeLinear = layer.packed
        rows = x.reshape(-1, x.shape[-1])
        if rows.dtype not in linear.input_dtypes:
            rows = rows.to(torch.bfloat16)
        if self.is_gathered:
            rows = tensor_model_parallel_all_gather(rows.contiguous())
        y = ops.linear_forward(ops.quantize_activation(rows.contiguous(), linear), linear).to(x.dtype)
        if self.is_gathered:
            y = tensor_model_parallel_all_gather(y)
        return y.view(*x.shape[:-1], y.shape[-1])


def load_own_rows(parameter: BasevLLMParameter, loaded_weight: Tensor) -> None:
    """Load a tensor of a layer that vLLM means to cut along its input as one that is cut by rows."""
    parameter.load_column_parallel_weight(loaded_weight=loaded_weight)


def _plain(parameter: Tensor) -> Tensor:
    """A loaded parameter as an ordinary tensor on the CPU."""
    return parameter.detach().cpu().as_subclass(Tensor)


def _empty_tensors(layout: LinearLayout, rows: int) -> dict[str, Tensor]:
    """Stored weights and scales of a layout, by suffix, zero (scales one), in their own dtypes: while vLLM builds a
    model the default dtype is the model's."""
    widths = {
        bits: sum(segment.width for segment in layout.segments if segment.weight_bits == bits) for bits in (4, 8, 16)
    }
    return {
        "weight_packed": torch.zeros(rows, widths[4] // 8, dtype=torch.int32),
        "weight_int8": torch.zeros(rows, widths[8], dtype=torch.int8),
        "weight_outlier": torch.zeros(rows, widths[16], dtype=torch.bfloat16),
        "weight_scale": torch.ones(rows, layout.num_scales, dtype=torch.float32),
    }
