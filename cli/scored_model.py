"""A packed checkpoint or a source model behind one face: token ids in, logits out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from w4a4.configs.architecture import ModelConfig, quantization_method
from w4a4.configs.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from w4a4.calibrate.decoder import FloatModel
    from w4a4.kernels.layout import ActMode
    from w4a4.serve.evaluate import LazyLogits
    from w4a4.serve.model import CausalLM


@dataclass(frozen=True)
class ScoredModel:
    """A model ready to be scored, and the way it runs, in words for people."""

    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    logits: Callable[[Tensor], LazyLogits]  # int64 [B, T] -> float32 [B, T, V]
    device: torch.device
    path: str  # what multiplies: "reference-cpu", ...
    act: str  # "map", "a8", or "float"
    kv_bits: int


def open_scored(
    model: str, act: str | None, kv: str | None, device: str | None, *, offline: bool, revision: str | None
) -> ScoredModel:
    """A packed checkpoint or a source model by the name that was typed.

    Raises:
        UsageError: --act or --kv with a source model, which runs in float.
    """
    from w4a4.calibrate.source import load_tokenizer, open_source
    from w4a4.cli.device import choose_device

    folder = Path(model)
    if is_packed(folder):
        from w4a4.export.checkpoint import open_checkpoint
        from w4a4.serve.model import CausalLM

        chosen = choose_device(device, for_kernels=True)
        mode = default_act(act, chosen)
        packed = CausalLM(open_checkpoint(folder), chosen, mode, int(kv) if kv else None)
        paths = ", ".join(sorted(set(packed.paths().values())))
        logits = lazy_logits(packed)
        return ScoredModel(packed.config, load_tokenizer(folder), logits, chosen, paths, mode, packed.kv_bits)
    if act or kv:
        raise UsageError(f"{model} is a source model and runs in float: --act and --kv are for packed checkpoints")
    from w4a4.calibrate.decoder import FloatModel

    source = open_source(model, offline=offline, revision=revision)
    chosen = choose_device(device)
    logits = lazy_logits(FloatModel(source, chosen))
    return ScoredModel(source.config, source.tokenizer(), logits, chosen, "float32", "float", 32)


def lazy_logits(model: CausalLM | FloatModel) -> Callable[[Tensor], LazyLogits]:
    """`model` as a function of tokens int64 [B, T] whose logits come a few rows at a time, never a whole window's."""
    from w4a4.serve.evaluate import LazyLogits

    def head(hidden: Tensor) -> Tensor:
        return model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    return lambda tokens: LazyLogits(model.hidden_states(tokens), head)


def default_act(act: str | None, device: torch.device) -> ActMode:
    """The activation mode of a packed model: `act`, else the precision map, or 8 bits on Hopper (free there)."""
    from w4a4.serve.model_runner import choose_act

    return choose_act(act or "auto", device)


def is_packed(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint of ours, by its config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    return isinstance(config, dict) and quantization_method(config) == "w4a4"
