"""What a fresh checkpoint is worth, measured before it is published: a short slice of text, and one sentence.

The source is held in memory when it fits twice. Else it is streamed layer by layer, then the packed model runs and is
dropped, and what is in memory while logits are compared is two heads; the sentence is left out.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from w4a4.configs.errors import NumericsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from w4a4.calibrate.source import Source
    from w4a4.serve.evaluate import LazyLogits

PROMPT: Final = "The capital of France is"
PROMPT_TOKENS: Final = 16
WINDOW: Final = 1024
M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
CHARACTERS_PER_TOKEN: Final = 64  # more than any tokenizer takes on average


@dataclass(frozen=True)
class QualityGate:
    """Perplexity of a packed folder and of its source on the first `tokens` tokens of `data`, test split."""

    source: Source
    data: str
    tokens: int
    device: torch.device
    fail_above: float | None
    offline: bool = False

    def measure(self, folder: Path) -> dict[str, Any]:
        """Measure the packed checkpoint in `folder`: what goes into the manifest and the model card.

        Raises:
            NumericsError: the perplexity exceeds `fail_above`.
        """
        from w4a4.calibrate.text import load_text, windows
        from w4a4.cli.scored_model import open_scored
        from w4a4.serve.evaluate import evaluate

        seq = min(WINDOW, self.source.config.max_position_embeddings, self.tokens)
        text = load_text(self.data, "test", offline=self.offline)
        beginning = text[: CHARACTERS_PER_TOKEN * self.tokens]  # the rest need not be tokenised
        tokenizer = self.source.tokenizer()
        ids = windows(tokenizer, beginning, seq, max(seq, self.tokens))
        return_freed_memory()
        reference, is_resident = self._source_logits(ids)
        scored = open_scored(str(folder), None, None, str(self.device), offline=True, revision=None)
        path, packed = f"{scored.path}, act {scored.act}", scored.logits
        if not is_resident:
            packed = _of_these(packed(ids))
            del scored  # its layers: from here on both heads are all that is needed
            return_freed_memory()
        result = evaluate(packed, ids, reference, batch=len(ids))
        measured: dict[str, Any] = {key: _rounded(value) for key, value in result.to_dict().items()} | {
            "path": path,
            "text": f"{text.name} {text.split_name}",
            "seq": seq,
        }
        if is_resident:
            prompt = tokenizer.encode(PROMPT)
            measured["sample"] = {
                "prompt": PROMPT,
                "source": tokenizer.decode(greedy(reference, prompt, PROMPT_TOKENS)),
                "packed": tokenizer.decode(greedy(packed, prompt, PROMPT_TOKENS)),
            }
        if self.fail_above is not None and not result.perplexity <= self.fail_above:
            raise NumericsError(
                f"quality gate: perplexity {result.perplexity:.3f} exceeds {self.fail_above:g} "
                f"(source: {result.source_perplexity:.3f}); nothing was published",
                "the same command without --fail-if-ppl-above publishes it; or another --recipe, or more --samples",
            )
        return measured

    def _source_logits(self, ids: Tensor) -> tuple[Callable[[Tensor], LazyLogits], bool]:
        """The source as a function of tokens, and whether it is held in memory: if not, it is one of `ids` alone."""
        from w4a4.calibrate.decoder import FloatModel
        from w4a4.cli.scored_model import lazy_logits
        from w4a4.export.estimate import available_memory

        if 2 * 4 * self.source.config.num_parameters <= available_memory(self.device):
            return lazy_logits(FloatModel(self.source, self.device)), True
        give_back_freed_tensors()
        return _of_these(streamed_logits(self.source, ids, self.device)), False


def _of_these(logits: LazyLogits) -> Callable[[Tensor], LazyLogits]:
    """Logits that are known already, as a function of the tokens that they are of."""
    return lambda tokens: logits


def streamed_logits(source: Source, tokens: Tensor, device: torch.device) -> LazyLogits:
    """Logits of int64 [B, T] tokens with one decoder layer of the source in memory at a time; its head from their first
    row on.
    """
    from torch.nn.functional import linear

    from w4a4.calibrate.decoder import lm_head_weight, run_layers
    from w4a4.kernels.reference import rms_norm
    from w4a4.serve.evaluate import LazyLogits

    *_, (_, hidden) = run_layers(source, tokens, device=device)
    normed = rms_norm(hidden, source.tensor("model.norm.weight").to(hidden.device), source.config.rms_norm_eps)
    return_freed_memory()

    @cache
    def head() -> Tensor:
        return lm_head_weight(source).to(hidden.device)

    return LazyLogits(normed, lambda rows: linear(rows, head()))


def _rounded(value: Any) -> Any:
    """Five digits of a float: what does not change with how much of the source fits into memory."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def return_freed_memory() -> None:
    """Have the C library give back what it keeps of freed blocks: hundreds of MB after a model was loaded (glibc)."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def give_back_freed_tensors() -> None:
    """Have glibc take each tensor from the system and return it when it is freed, for the rest of the process.

    Tensors of some MB are otherwise pieces of a heap that never shrinks: a model that was dropped would still count.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def greedy(logits: Callable[[Tensor], LazyLogits], prompt: list[int], count: int) -> list[int]:
    """`prompt` and the `count` most probable tokens after it, the whole sequence scored again for each."""
    import torch

    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(torch.tensor([ids])).rows(len(ids) - 1, len(ids)).argmax()))
    return ids
