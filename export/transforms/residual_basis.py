"""One orthogonal basis for the residual stream: its principal axes by ascending variance, mixed with their neighbours.

U = P R: P holds the eigenvectors of the stream's second moment by ascending eigenvalue, R is block-diagonal, random
signs times a Hadamard matrix. The axes keep their order of variance, block by block, so a balance of channels can act
on it and the last blocks are those that 8 bits serve best (principal axes: ResQ, Saxena et al. 2024; rotations as in
QuaRot, Ashkboos et al. 2024). Folded into embeddings, readers, writers and lm_head it costs nothing at run time, since
a norm without gain commutes with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.transforms import ATTENTION_READERS, FFN_READERS, WRITERS, LayerWeights
from w4a4.kernels.reference import block_hadamard

MIXED_AXES = 64
_MAX_GAIN_DEVIATION = 1e-6


def residual_basis(second_moment: Tensor, seed: int, mixed: int = MIXED_AXES) -> Tensor:
    """The basis U, float32 [H, H], orthogonal; a stored coordinate vector is x U.

    Args:
        second_moment: [H, H], the sum over all norm inputs of E[x xᵀ], x after the norm without its gain.
        seed: of the signs. Equal seeds give equal bases.
        mixed: axes that a block of R mixes, a power of two; fewer where that does not divide H.

    Raises:
        NumericsError: the second moment is not finite.
    """
    hidden = second_moment.shape[0]
    if not torch.isfinite(second_moment).all():
        raise NumericsError(f"the second moment of the residual stream [{hidden}, {hidden}] is not finite")
    symmetric = second_moment.double()
    _, axes = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (hidden,), generator=generator).to(axes) * 2 - 1
    return block_hadamard(axes * signs, math.gcd(hidden, mixed)).float()


def rotate_layer(layer: LayerWeights, basis: Tensor) -> dict[str, Tensor]:
    """Put a layer whose norm gains are folded into the basis: readers W U, writers Uᵀ W and Uᵀ b.

    Raises:
        UsageError: a norm still has a gain (it would not commute with the basis).
    """
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        if (layer[norm] - 1).abs().max() > _MAX_GAIN_DEVIATION:
            raise UsageError(f"{norm} still has a gain", "fold the norm gains before the residual basis")
    rotated = dict(layer)
    for reader in (*ATTENTION_READERS, *FFN_READERS):
        rotated[f"{reader}.weight"] = layer[f"{reader}.weight"] @ basis.to(layer[f"{reader}.weight"])
    for writer in WRITERS:
        weight = layer[f"{writer}.weight"]
        rotated[f"{writer}.weight"] = basis.to(weight).T @ weight
        if f"{writer}.bias" in layer:
            rotated[f"{writer}.bias"] = layer[f"{writer}.bias"] @ basis.to(weight)
    return rotated


def rotate_rows(table: Tensor, basis: Tensor) -> Tensor:
    """An embedding or lm_head [V, H] (the final norm's gain folded) in the basis: every row x becomes x U."""
    return table @ basis.to(table)
