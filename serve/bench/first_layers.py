"""The first layers of a packed model as a model of its own: small enough for the reference on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.kernels.layout import LinearLayout
from w4a4.serve.model import PackedModel


@dataclass(frozen=True)
class HeldLinear:
    """A stored linear whose tensors are on one device; fields as `ops.StoredLinear`."""

    layout: LinearLayout
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    perm: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class FirstLayers:
    """Layers 0 to num_layers - 1 of `packed`, and the first `vocab_size` tokens of its embedding and head.

    Tensors are given out on `device`.
    """

    packed: PackedModel
    num_layers: int
    vocab_size: int
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        config = self.packed.config
        windows = config.sliding_windows[: self.num_layers]
        return replace(config, num_layers=self.num_layers, vocab_size=self.vocab_size, sliding_windows=windows)

    @property
    def quantization(self) -> Mapping[str, Any]:
        return self.packed.quantization

    def linear(self, prefix: str) -> HeldLinear:
        linear = self.packed.linear(prefix)

        def held(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device)

        return HeldLinear(
            linear.layout,
            tuple(weight.to(self.device) for weight in linear.weights),
            linear.weight_scales.to(self.device),
            held(linear.perm),
            held(linear.bias),
        )

    def tensor(self, name: str) -> Tensor:
        tensor = self.packed.tensor(name)
        if tensor.shape[0] == self.packed.config.vocab_size and tensor.ndim == 2:
            tensor = tensor[: self.vocab_size]
        return tensor.to(self.device)
