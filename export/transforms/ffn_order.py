"""The inner channels of the feed-forward: their order, and the Hadamard that runs online before down_proj.

The order is free (rows of gate and up, columns of down_proj); the Hadamard's inverse is folded into down_proj, its
forward half runs with the quantisation of down_proj's input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.configs.errors import UsageError
from w4a4.export.transforms import FFN_READERS, LayerWeights
from w4a4.kernels.reference import block_hadamard


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


def fold_block_hadamard(layer: LayerWeights, block: int) -> dict[str, Tensor]:
    """down_proj for an input multiplied by the block-diagonal Hadamard (`kernels.reference.block_hadamard`): W H.

    Raises:
        UsageError: the inner width is not a multiple of `block`.
    """
    weight = layer["mlp.down_proj.weight"]
    if weight.shape[1] % block:
        raise UsageError(f"down_proj's {weight.shape[1]} inputs are not a multiple of the Hadamard block {block}")
    return {**layer, "mlp.down_proj.weight": block_hadamard(weight, block)}
