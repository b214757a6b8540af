"""A packed linear as a PyTorch module that stands where `nn.Linear` stood, for runtimes that build models of modules.

It holds the checkpoint's tensors as buffers under their stored names, so that any loader of state dicts can fill it,
and makes from them what `kernels.ops` computes with, once per device. Each module quantises its own input: q, k and v
do so three times, which `serve/model.py` does once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from w4a4.export.checkpoint import PackedCheckpoint, PackedLinear
from w4a4.kernels import ops
from w4a4.kernels.layout import ActMode, LinearLayout
from w4a4.serve.model_runner import choose_act


class PackedLinearModule(nn.Module):
    """y [..., N] = x [..., K] Wᵀ + b, in x's dtype, of a linear that is stored as `PackedLinear`.

    Args:
        checkpoint, prefix: where it is stored; names, dtypes and shapes are taken from there, values are not read.
    """

    def __init__(self, checkpoint: PackedCheckpoint, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.act: ActMode | None = None  # None: as `w4a4 serve` would on that device
        self._rules = checkpoint.rules
        self._suffixes: tuple[str, ...] = ()
        self._runtime: ops.RuntimeLinear | None = None
        self._runtime_act: ActMode | None = None
        layout: LinearLayout = checkpoint.layout(prefix)
        self.in_features, self.out_features = layout.in_features, layout.out_features
        for suffix, tensor in checkpoint.linear_tensors(prefix).items():
            self.register_buffer(suffix, torch.empty_like(tensor, device="meta"))
            self._suffixes += (suffix,)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """The checkpoint's tensors by suffix."""
        return {suffix: self.get_buffer(suffix) for suffix in self._suffixes}

    def prepare(self) -> ops.RuntimeLinear:
        """What runs on the device of the buffers, made when it changes.

        Raises:
            CheckpointError: a permutation, map, scale or clip that makes no sense.
            UnsupportedDeviceError: no kernels for the device.
        """
        stored = self.stored
        device = stored["weight_shape"].device
        act = self.act or choose_act(None, device)
        if self._runtime is None or self._runtime.device != device or self._runtime_act != act:
            on_cpu = {suffix: tensor.cpu() for suffix, tensor in stored.items()}
            linear = PackedLinear.from_tensors(self.prefix, on_cpu, self._rules, "")
            self._runtime = ops.fuse_linears([linear], device, act)
            self._runtime_act = act
        return self._runtime

    def forward(self, x: Tensor) -> Tensor:
        linear = self.prepare()
        rows = x.reshape(-1, self.in_features)
        rows = rows.to(torch.float32 if rows.device.type == "cpu" else torch.bfloat16).contiguous()
        y = ops.linear_forward(ops.quantize_activation(rows, linear), linear)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
