"""One orthogonal basis for the residual stream: the directions of largest variance last, each region mixed evenly.

U = [P_l R_l | P_h R_h]: P holds the eigenvectors of the stream's second moment by ascending eigenvalue, split before
the last K8; R_l and R_h are random orthogonal matrices of Kronecker form. The last K8 coordinates become the 8-bit
segment of every linear that reads the stream (ResQ, Saxena et al. 2024; rotations as in QuaRot, Ashkboos et al. 2024).
Folded into embeddings, readers, writers and lm_head it costs nothing at run time, since a norm without gain commutes
with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.transforms import ATTENTION_READERS, FFN_READERS, WRITERS, LayerWeights
from w4a4.kernels.reference import hadamard_matrix

_MAX_GAIN_DEVIATION = 1e-6


def residual_basis(second_moment: Tensor, wide_channels: int, seed: int) -> Tensor:
    """The basis U, float32 [H, H], orthogonal; a stored coordinate vector is x U.

    Args:
        second_moment: [H, H], the sum over all norm inputs of E[x xᵀ], x after the norm without its gain.
        wide_channels: K8, how many coordinates of largest variance come last; 0 to H.
        seed: of the signs and of Q_m in R. Equal seeds give equal bases.

    Raises:
        NumericsError: the second moment is not finite.
        UsageError: `wide_channels` out of range.
    """
    hidden = second_moment.shape[0]
    if not 0 <= wide_channels <= hidden:
        raise UsageError(f"the 8-bit segment of a residual stream of {hidden} cannot have {wide_channels} channels")
    if not torch.isfinite(second_moment).all():
        raise NumericsError(f"the second moment of the residual stream [{hidden}, {hidden}] is not finite")
    symmetric = second_moment.double()
    _, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    generator = torch.Generator().manual_seed(seed)
    regions = torch.split(vectors, [hidden - wide_channels, wide_channels], 1)
    mixed = [region @ random_rotation(region.shape[1], generator).to(region) for region in regions if region.shape[1]]
    return torch.cat(mixed, 1).float()


def random_rotation(width: int, generator: torch.Generator) -> Tensor:
    """diag(random signs) (Q_m ⊗ H_p), float64 [width, width], orthogonal.

    p is the largest power of two that divides the width, H_p Sylvester's Hadamard matrix over sqrt(p), Q_m [m, m] a
    random orthogonal matrix (Haar: QR of a Gaussian with the signs of R's diagonal fixed).
    """
    power = width & -width
    signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
    gaussian = torch.randn(width // power, width // power, generator=generator, dtype=torch.float64)
    orthogonal, triangular = torch.linalg.qr(gaussian)
    orthogonal = orthogonal * torch.sign(triangular.diagonal())
    hadamard = hadamard_matrix(power).double().sign() / power**0.5
    return signs[:, None] * torch.kron(orthogonal.contiguous(), hadamard)


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
