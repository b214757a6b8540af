"""The inner channels of the feed-forward, whose order is free: rows of gate and up, columns of down_proj."""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.export.transforms import FFN_READERS, LayerWeights


def channel_order(inner_energy: Tensor, down_weight: Tensor) -> Tensor:
    """Channels by ascending share of the output's energy, E[h²] · ‖W_down[:, i]‖² -> int64 [I]; the strongest last.

    inner_energy: E[h²] per channel [I], tokens of massive norm capped; down_weight [H, I].
    """
    return torch.argsort(inner_energy.float() * down_weight.float().square().sum(0), stable=True)


def fold_channel_order(layer: LayerWeights, order: Tensor) -> dict[str, Tensor]:
    """New inner channel j is old channel `order[j]` (int64 [I], a permutation)."""
    folded = dict(layer)
    for reader in FFN_READERS:
        for kind in ("weight", "bias"):
            key = f"{reader}.{kind}"
            if key in layer:
                folded[key] = layer[key][order]
    folded["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"][:, order]
    return folded
