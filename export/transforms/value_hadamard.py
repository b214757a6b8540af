"""Values and o_proj: a Hadamard per head.

Attention mixes tokens, not the channels of a head, so an orthogonal matrix on a kv-head's values can be undone in
o_proj's columns (QuaRot). It makes values easy to quantise and spreads outliers of o_proj's input over each head.
"""

from __future__ import annotations

from torch import Tensor

from w4a4.export.transforms import LayerWeights
from w4a4.kernels.reference import block_hadamard


def fold_value_hadamard(layer: LayerWeights, head_dim: int) -> dict[str, Tensor]:
    """Multiply the values of every head by H, and o_proj's columns of every q-head by H (its own inverse).

    H is Sylvester's Hadamard of the largest power of two that divides `head_dim`, repeated down the diagonal.
    """
    block = head_dim & -head_dim
    folded = dict(layer)
    value = layer["self_attn.v_proj.weight"]
    folded["self_attn.v_proj.weight"] = block_hadamard(value.T, block).T.contiguous()
    if "self_attn.v_proj.bias" in layer:
        folded["self_attn.v_proj.bias"] = block_hadamard(layer["self_attn.v_proj.bias"], block)
    folded["self_attn.o_proj.weight"] = block_hadamard(layer["self_attn.o_proj.weight"], block)
    return folded
