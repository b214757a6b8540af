"""Fold the gain of a root-mean-square norm into the linears that read it, so that the norm itself has none."""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.export.transforms import ATTENTION_READERS, FFN_READERS, LayerWeights

_READERS = {"input_layernorm.weight": ATTENTION_READERS, "post_attention_layernorm.weight": FFN_READERS}


def fold_norm_gains(layer: LayerWeights) -> dict[str, Tensor]:
    """Scale the columns of q, k, v and of gate, up by the gain of the norm before them; both gains become ones.

    (g ⊙ x) Wᵀ = x (W diag g)ᵀ, g [H], W [N, H]. Biases do not change.
    """
    folded = dict(layer)
    for norm, readers in _READERS.items():
        gain = layer[norm]
        for reader in readers:
            folded[f"{reader}.weight"] = layer[f"{reader}.weight"] * gain
        folded[norm] = torch.ones_like(gain)
    return folded


def fold_final_norm(gain: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """The final norm's gain [H] and lm_head [V, H] -> ones [H], lm_head with the gain in it.

    A model with tied embeddings must be untied first: its embedding does not take the gain.
    """
    return torch.ones_like(gain), lm_head * gain
