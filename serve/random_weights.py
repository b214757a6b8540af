"""A packed model of any shape with random weights, made on the device: what a 70B costs to run, without its weights.

Layout and online work are near those of the `dual` recipe: an eighth of the input channels of every linear in int8
behind the int4 ones (`dual` spends up to a fifth, unevenly, and has a gain behind each norm), a head order in front of
o_proj, a block Hadamard in front of down_proj, KV4 with Hadamard, mean, sinks. Codes are uniform over their whole
range, which is the worst case for the power that the arithmetic draws. What such a model says is
noise, and everything that reports its speed calls it "random weights".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.kernels.layout import LinearLayout, Segment

BLOCK = 128  # channels: precision changes at multiples of this
LABEL = "random weights"


@dataclass(frozen=True)
class RandomLinear:
    """One linear with random codes; fields as `ops.StoredLinear`."""

    layout: LinearLayout
    weights: tuple[Tensor, ...]
    weight_scales: Tensor
    perm: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class RandomModel:
    """Everything `CausalLM` asks of a checkpoint. A tensor depends on its name and `seed` alone.

    kv_bits: 4 or 16 bits of the KV cache.
    """

    config: ModelConfig
    device: torch.device
    seed: int = 0
    kv_bits: int = 4
    quantization: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kv = {"bits": self.kv_bits, "qk_hadamard": True, "k_mean": True, "sink_tokens": 4 if self.kv_bits == 4 else 0}
        object.__setattr__(self, "quantization", {"recipe": "dual", "kv_cache": kv})

    def linear(self, prefix: str) -> RandomLinear:
        """The linear `prefix`, such as "model.layers.0.self_attn.q_proj"."""
        name = prefix.split(".", 3)[3]
        rows, columns = self.config.linear_shapes()[name]
        layout = layout_of(name, rows, columns)
        generator = self._generator(prefix)
        weights = []
        for segment in layout.segments:
            low, high = (-8, 8) if segment.weight_bits == 4 else (-127, 128)
            weights.append(
                torch.randint(
                    low, high, (rows, segment.width), dtype=torch.int8, device=self.device, generator=generator
                )
            )
        # rows of roughly unit length, so that activations keep their size: the codes' deviation is 4.6 or 73.6
        spread = [4.6 if segment.weight_bits == 4 else 73.6 for segment in layout.segments]
        scales = torch.rand(rows, len(spread), device=self.device, generator=generator) + 0.5
        scales *= columns**-0.5 / torch.tensor(spread, device=self.device)
        perm = bias = None
        if name == "self_attn.o_proj":
            heads = torch.randperm(self.config.num_heads, generator=torch.Generator().manual_seed(self._seed(prefix)))
            perm = (heads[:, None] * self.config.head_dim + torch.arange(self.config.head_dim)).flatten().int()
        if name == "self_attn.o_proj" or self.config.has_bias(name):  # the mean of the values folds into o_proj's bias
            bias = 0.1 * torch.randn(rows, generator=torch.Generator().manual_seed(self._seed(prefix) + 1))
        return RandomLinear(layout, tuple(weights), scales, perm, bias)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is not packed: norm gains are ones, as they are once folded into the linears."""
        if name.endswith("k_mean"):
            return self._normal(name, (self.config.num_kv_heads, self.config.head_dim)).float()
        shape = self.config.tensor_shapes()[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        return self._normal(name, shape).mul_(self.config.hidden_size**-0.5)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=self._generator(name))

    def _seed(self, name: str) -> int:
        return crc32(f"{self.seed} {name}".encode())

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self._seed(name))


def layout_of(name: str, rows: int, columns: int) -> LinearLayout:
    """The `dual` layout of a linear: the last eighth of the channels (whole blocks, at least one) at 8 bits."""
    high = max(BLOCK, columns // 8 // BLOCK * BLOCK) if columns > BLOCK else 0
    segments = [Segment(columns - high, 4, 4)] + ([Segment(high, 8, 8)] if high else [])
    hadamard = min(BLOCK, columns & -columns) if name == "mlp.down_proj" else 1
    return LinearLayout(rows, tuple(segments), clip=(0.9, 2.5), hadamard=hadamard)
