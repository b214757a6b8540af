"""How good a model is on a text: perplexity, and how far it is from a source model (KL divergence, top-1 agreement).

It knows nothing about checkpoints or tokenizers: a model is a function from token ids to logits. Windows are scored one
batch at a time and logits are reduced in blocks of rows, so memory is that of one window whatever the vocabulary.

Within a window of T tokens, position t predicts token t + 1: T - 1 tokens are scored, and each window starts without
context (the rule of GPTQ's tables).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError

BLOCK_ELEMENTS = 1 << 24  # float32 logits reduced at a time: 64 MiB, and about four times that with the temporaries
GPU_BLOCK_ELEMENTS = 1 << 28  # the same on a GPU, where launches are what many small blocks would wait for


@dataclass(frozen=True)
class LazyLogits:
    """Logits [B, T, V] of which a block of rows exists only while it is read.

    Lets a model with a vocabulary of 152,000 return a window of 2,048 tokens (1.2 GB of float32) as its hidden states.
    """

    hidden: Tensor  # [B, T, H]
    head: Callable[[Tensor], Tensor]  # [B, t, H] -> [B, t, V]

    def rows(self, start: int, stop: int) -> Tensor:
        """Logits [B, stop - start, V]."""
        return self.head(self.hidden[:, start:stop])


LogitsFunction = Callable[[Tensor], Tensor | LazyLogits]  # ids int64 [B, T] -> logits [B, T, V]


@dataclass(frozen=True)
class Evaluation:
    """One model's score. Losses and divergence are means in nats per scored token; `source_*`, `kl` and
    `top1_agreement` are None where no source model was given."""

    windows: int
    window: int  # tokens in each
    tokens_scored: int
    loss: float
    source_loss: float | None = None
    kl: float | None = None  # KL(source || model)
    top1_agreement: float | None = None  # share of tokens for which both models' most probable token is the same
    log_ratio_stderr: float | None = None  # standard error of loss - source_loss over windows; None with one window

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def source_perplexity(self) -> float | None:
        return None if self.source_loss is None else math.exp(self.source_loss)

    @property
    def ratio(self) -> float | None:
        """Perplexity over the source model's."""
        return None if self.source_loss is None else math.exp(self.loss - self.source_loss)

    def to_dict(self) -> dict[str, Any]:
        derived = {"perplexity": self.perplexity, "source_perplexity": self.source_perplexity, "ratio": self.ratio}
        return {**asdict(self), **derived}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def evaluate(
    model: LogitsFunction,
    ids: Tensor,
    source: LogitsFunction | None = None,
    *,
    batch: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score `model` on windows `ids` [n, T], beside `source` if given. See `evaluate_all`."""
    return evaluate_all({"model": model}, ids, source, batch=batch, progress=progress)["model"]


@torch.inference_mode()
def evaluate_all(
    models: Mapping[str, LogitsFunction],
    ids: Tensor,
    source: LogitsFunction | None = None,
    *,
    batch: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Evaluation]:
    """Score several models on the same windows `ids` int64 [n, T]; the source runs once per window for all of them.

    Args:
        batch: windows given to a model at a time.
        progress: called with (windows done, windows in all) after each batch.

    Raises:
        UsageError: no window, a window of one token, ids beyond the vocabulary, or vocabularies that differ.
        NumericsError: a model's logits are not finite.
    """
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise UsageError(f"nothing to score: windows must be [n >= 1, T >= 2], got {tuple(ids.shape)}")
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
    sums = {name: _Sums() for name in models}
    for start in range(0, ids.shape[0], batch):
        chunk = ids[start : start + batch]
        source_logits = source(chunk) if source is not None else None
        for name, model in models.items():
            sums[name].add(name, chunk, model(chunk), source_logits)
        del source_logits
        if progress is not None:
            progress(min(start + batch, ids.shape[0]), ids.shape[0])
    return {name: total.result(*ids.shape) for name, total in sums.items()}


class _Sums:
    """Float64 sums over scored tokens; losses are kept per window for the standard error."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.source_losses: list[float] = []
        self.kl = 0.0
        self.agreed = 0

    def add(self, name: str, ids: Tensor, logits: Tensor | LazyLogits, source: Tensor | LazyLogits | None) -> None:
        scored = ids.shape[1] - 1
        losses = torch.zeros(ids.shape[0], dtype=torch.float64)
        source_losses = torch.zeros_like(losses)
        start, rows = 0, 1  # the first block is one row: it tells the vocabulary
        while start < scored:
            stop = min(start + rows, scored)
            block = _log_probabilities(name, logits, start, stop, ids)
            targets = ids[:, start + 1 : stop + 1, None].to(block.device)
            losses -= block.gather(2, targets).double().sum((1, 2)).cpu()
            if source is not None:
                reference = _log_probabilities("the source model", source, start, stop, ids).to(block.device)
                if reference.shape != block.shape:
                    raise UsageError(f"{name} has {block.shape[2]} tokens, its source model {reference.shape[2]}")
                source_losses -= reference.gather(2, targets).double().sum((1, 2)).cpu()
                self.agreed += int((block.argmax(2) == reference.argmax(2)).sum())
                self.kl += float((reference.exp() * (reference - block)).sum(2, dtype=torch.float64).sum())
            elements = GPU_BLOCK_ELEMENTS if block.is_cuda else BLOCK_ELEMENTS
            start, rows = stop, max(1, elements // (block.shape[0] * block.shape[2]))
        self.losses += losses.tolist()
        if source is not None:
            self.source_losses += source_losses.tolist()

    def result(self, count: int, window: int) -> Evaluation:
        tokens = count * (window - 1)
        loss = math.fsum(self.losses) / tokens
        if not self.source_losses:
            return Evaluation(count, window, tokens, loss)
        differences = torch.tensor(self.losses, dtype=torch.float64) - torch.tensor(
            self.source_losses, dtype=torch.float64
        )
        stderr = float(differences.std() / (window - 1) / math.sqrt(count)) if count > 1 else None
        source_loss = math.fsum(self.source_losses) / tokens
        return Evaluation(
            count, window, tokens, loss, source_loss, self.kl / tokens, self.agreed / tokens, log_ratio_stderr=stderr
        )


def _log_probabilities(name: str, logits: Tensor | LazyLogits, start: int, stop: int, ids: Tensor) -> Tensor:
    """log softmax of rows [start, stop) in float32, [B, rows, V], checked."""
    block = logits[:, start:stop] if isinstance(logits, Tensor) else logits.rows(start, stop)
    if block.ndim != 3 or block.shape[:2] != (ids.shape[0], stop - start):
        raise UsageError(f"{name} returned logits of shape {tuple(block.shape)} for ids of shape {tuple(ids.shape)}")
    if int(ids.max()) >= block.shape[2]:
        raise UsageError(
            f"token {int(ids.max())} is beyond {name}'s vocabulary of {block.shape[2]}", "use the model's own tokenizer"
        )
    if not bool(torch.isfinite(block).all()):
        raise NumericsError(f"{name}'s logits are not finite at positions {start} to {stop - 1} of a window")
    return torch.log_softmax(block.float(), 2)
