"""A packed checkpoint or a source model behind one face: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from w4a4.configs.aliases import known_models
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from w4a4.calibrate.decoder import FloatModel
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
    from w4a4.calibrate.source import open_source
    from w4a4.configs.tokenizer_files import load_tokenizer
    from w4a4.export.checkpoint import is_packed, open_checkpoint
    from w4a4.serve.device import choose_device

    folder = Path(model)
    if is_packed(folder):
        from w4a4.serve.model import CausalLM
        from w4a4.serve.model_runner import choose_act

        checkpoint = open_checkpoint(folder)
        tokenizer = load_tokenizer(folder, checkpoint.config.vocab_size)
        chosen = choose_device(device, for_kernels=True)
        mode = choose_act(act, chosen)
        packed = CausalLM(checkpoint, chosen, mode, int(kv) if kv else None)
        paths = ", ".join(sorted(set(packed.paths().values())))
        return ScoredModel(packed.config, tokenizer, lazy_logits(packed), chosen, paths, mode, packed.kv_bits)
    if act or kv:
        raise UsageError(f"{model} is a source model and runs in float: --act and --kv are for packed checkpoints")
    from w4a4.calibrate.decoder import FloatModel

    source = open_source(model, offline=offline, revision=revision)
    chosen = choose_device(device)
    logits = lazy_logits(FloatModel(source, chosen))
    return ScoredModel(source.config, source.tokenizer(), logits, chosen, "float32", "float", 32)


def lazy_logits(model: CausalLM | FloatModel) -> Callable[[Tensor], LazyLogits]:
    """`model` as a function of tokens int64 [B, T] whose logits come a few rows at a time, never a whole window's.

    What it returns keeps the model's head in memory, not its layers.
    """
    from w4a4.serve.evaluate import LazyLogits

    head_alone = copy(model)
    head_alone.layers = []

    def head(hidden: Tensor) -> Tensor:
        return head_alone.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    return lambda tokens: LazyLogits(model.hidden_states(tokens), head)


def packed_folder(name: str, hint: str = "") -> Path:
    """The checkpoint folder called `name`, told by its config.json; no tensor is looked at.

    Raises:
        UsageError: `name` is an alias or a .gguf file: a source model.
        NotFoundError: there is nothing of that name.
        Others as `open_checkpoint`: a folder that is no sound checkpoint, a source model's included.
    """
    from w4a4.export.checkpoint import read_config
    from w4a4.export.quantization_config import read_quantization_config

    folder = Path(name)
    hint = hint or f"w4a4 quantize {name}"
    if folder.is_dir():
        read_quantization_config(read_config(folder))
        return folder
    if name in known_models() or (folder.suffix == ".gguf" and folder.is_file()):
        raise UsageError(f"{name} is a source model, not a packed checkpoint", hint)
    raise NotFoundError(f"{name} is not a checkpoint folder", "make one: w4a4 quantize MODEL")
