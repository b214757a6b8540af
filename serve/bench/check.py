"""Before a speed is told: does the thing that was timed compute the model?

The first layers of the same weights run on the device, through prefill and decode graph, and as the reference on a CPU,
on random tokens. bf16 arithmetic flips activation codes that lie between two values, so logits differ by a few percent,
with 4-bit activations by some more; a wrong page, scale or order gives an error near 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError
from w4a4.kernels.layout import ActMode
from w4a4.serve.bench.first_layers import FirstLayers
from w4a4.serve.bench.fixed_batch import FixedBatch
from w4a4.serve.model import CausalLM, PackedModel

MAX_LAYERS = 2
MAX_VOCABULARY = 8192
NUM_PROMPT = 40  # over two page boundaries
NUM_DECODED = 6
TOLERANCE: dict[ActMode, float] = {"map": 0.25, "a8": 0.08, "a16": 0.08}
"""Relative error by activation mode. Measured on an H200 (8B shape, two layers): map 0.115, a8 0.019."""


@dataclass(frozen=True)
class Check:
    """relative_error: of all logits (Frobenius norm); top1: share of tokens with the same most probable token."""

    relative_error: float
    top1: float
    tokens: int
    layers: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "relative_error": float(f"{self.relative_error:.3g}"),
            "top1": round(self.top1, 4),
            "tokens": self.tokens,
            "layers": self.layers,
        }

    @property
    def sentence(self) -> str:
        return (
            f"logits of {self.tokens} tokens through {self.layers} layers are within {self.relative_error:.2%} of the "
            f"CPU reference's, {self.top1:.0%} of the most probable tokens are the same"
        )


def check_model(packed: PackedModel, device: torch.device, act: ActMode, kv_bits: int | None) -> Check:
    """Compare prefill and decode on `device` with the reference.

    Raises:
        NumericsError: they are further apart than bf16 can explain, or not finite.
    """
    layers = min(MAX_LAYERS, packed.config.num_layers)
    vocabulary = min(MAX_VOCABULARY, packed.config.vocab_size)
    ours = CausalLM(FirstLayers(packed, layers, vocabulary, device), device, act, kv_bits)
    cpu = torch.device("cpu")
    reference = CausalLM(FirstLayers(packed, layers, vocabulary, cpu), cpu, act, kv_bits)
    got, tokens = teacher_forced(ours)
    expected = reference.score(tokens.cpu())[:, NUM_PROMPT - 1 : NUM_PROMPT + NUM_DECODED - 1]
    got = got.cpu()
    if not bool(got.isfinite().all()):
        raise NumericsError("the model's logits are not finite on random tokens", "w4a4 doctor")
    check = Check(
        relative_error=float((got - expected).norm() / expected.norm()),
        top1=float((got.argmax(-1) == expected.argmax(-1)).float().mean()),
        tokens=got.shape[0] * got.shape[1],
        layers=layers,
    )
    if check.relative_error > TOLERANCE[act]:
        raise NumericsError(f"what would be timed is wrong: {check.sentence}", "report this as a bug")
    return check


def teacher_forced(model: CausalLM, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Prefill `NUM_PROMPT` tokens of three sequences, then decode given tokens one by one.

    Returns: logits [B, NUM_DECODED, V] from the end of the prompt on, and the tokens [B, NUM_PROMPT + NUM_DECODED].
    """
    run = FixedBatch(model, batch, NUM_PROMPT + NUM_DECODED)
    logits = [run.prefill(NUM_PROMPT).clone()]
    for context in range(NUM_PROMPT, NUM_PROMPT + NUM_DECODED - 1):
        run.seek(context)
        logits.append(run.decode(1).clone())
    return torch.stack(logits, 1), run.tokens
