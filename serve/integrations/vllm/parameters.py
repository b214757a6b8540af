"""How vLLM cuts a checkpoint's tensors between merged layers and ranks: its parameter classes, with what they lack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
)

from w4a4.configs.errors import CheckpointError
from w4a4.serve.integrations.input_slice import InputSlice


class SharedParameter(BasevLLMParameter):
    """A tensor that all layers of a merged one share, such as the order of their common input.

    Raises:
        CheckpointError: when two of them bring different ones.
    """

    is_loaded = False

    def _assert_and_load(self, loaded_weight: Tensor) -> None:
        if self.is_loaded and not torch.equal(self.data, loaded_weight):
            raise CheckpointError(
                "layers that vLLM merges differ in the order of their common input", "w4a4 verify DIR"
            )
        super()._assert_and_load(loaded_weight)
        self.is_loaded = True


class IgnoredParameter(BasevLLMParameter):
    """A tensor that is known from the checkpoint's headers already; loading it does nothing."""

    def _assert_and_load(self, loaded_weight: Tensor) -> None:
        pass


class _InputCut:
    """Loads a rank's columns of a layer that is cut along its input, in stored order."""

    cut: InputSlice
    suffix: str

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        self.data.copy_(self.cut.cut(self.suffix, loaded_weight))  # type: ignore[attr-defined]


class InputCutPacked(_InputCut, PackedvLLMParameter):
    pass


class InputCutWeight(_InputCut, ModelWeightParameter):
    pass


class InputCutScale(_InputCut, ChannelQuantScaleParameter):
    pass


def weight_parameter(suffix: str, data: Tensor, cut: InputSlice | None, weight_loader: Any) -> BasevLLMParameter:
    """The parameter of a stored weight or scale tensor of that suffix.

    Args:
        data: as large as this rank needs. cut: its share of the input where the layer is cut along that.
    """
    common: dict[str, Any] = {"data": data, "weight_loader": weight_loader, "output_dim": 0}
    parameter: BasevLLMParameter
    if suffix == "weight_packed":
        packed = InputCutPacked if cut else PackedvLLMParameter
        parameter = packed(**common, input_dim=1, packed_dim=1, packed_factor=8)
    elif suffix == "weight_scale":
        parameter = (InputCutScale if cut else ChannelQuantScaleParameter)(**common)
    else:
        parameter = (InputCutWeight if cut else ModelWeightParameter)(**common, input_dim=1)
    if cut:
        parameter.cut, parameter.suffix = cut, suffix
    return parameter
