"""A source whose tensors are read once and stay: layers on a device, what is outside of layers in host memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from w4a4.calibrate.source import Source


class ResidentSource:
    """`calibrate.source.Source` for several runs over one small model. Nobody may write to its tensors.

    Tensors are read by several threads at first, for most of the time goes into turning GGUF blocks into floats.
    """

    def __init__(self, source: Source, device: str, threads: int = 8) -> None:
        self._source = source
        names = sorted(source.names())
        with ThreadPoolExecutor(threads) as pool:
            tensors = pool.map(source.tensor, names)
            self._tensors = {
                name: tensor.to(device) if name.startswith("model.layers.") else tensor
                for name, tensor in zip(names, tensors, strict=True)
            }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str) -> Tensor:
        if name == "lm_head.weight" and name not in self._tensors:
            name = "model.embed_tokens.weight"
        return self._tensors[name]
