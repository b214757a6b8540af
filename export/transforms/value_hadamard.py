"""Values and o_proj: a Hadamard per head, and the heads that matter most to the output last.

Attention mixes tokens, not the channels of a head, so an orthogonal matrix on a kv-head's values can be undone in
o_proj's columns (QuaRot). It makes values easy to quantise and spreads outliers of o_proj's input over each head. The
order of q-heads is free inside a group that shares a kv-head, and groups are free as blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class HeadOrder:
    """How heads are ordered: new q-head j is old q-head `heads[j]`, new kv-head g is old `kv_heads[g]` (int64).

    heads, kv_heads: the part that is folded into the weights; the identity if the wanted order breaks up groups.
    input_heads: int64 [num_heads] or None: after the fold, stored head j of o_proj's input reads head
        `input_heads[j]`; None if the fold alone puts the wanted heads last.
    """

    heads: Tensor
    kv_heads: Tensor
    input_heads: Tensor | None

    def input_permutation(self, head_dim: int) -> Tensor | None:
        """`input_heads` per channel, int32 [num_heads * head_dim], as `.input_perm` stores it."""
        return None if self.input_heads is None else _channels(self.input_heads, head_dim).to(torch.int32)


def head_energy(output_energy: Tensor, output_weight: Tensor, head_dim: int) -> Tensor:
    """What each q-head contributes to the layer's output, [num_heads]: sum over its channels of E[o²] · ‖W_o‖².

    output_energy [num_heads * head_dim] is E[o²] per input channel of o_proj, output_weight its weight [H, same].
    """
    channel = output_energy.float() * output_weight.float().square().sum(0)
    return channel.view(-1, head_dim).sum(1)


def order_heads(energy: Tensor, num_kv_heads: int, wide_heads: int) -> HeadOrder:
    """Put the `wide_heads` q-heads of largest `energy` [num_heads] last.

    Folded if they are whole groups and at most one part of a group; otherwise nothing is folded and o_proj's input is
    permuted by heads when it is quantised, ascending by energy.
    """
    num_heads = energy.shape[0]
    group = num_heads // num_kv_heads
    ranking = torch.argsort(energy.float(), stable=True)
    natural, natural_kv = torch.arange(num_heads), torch.arange(num_kv_heads)
    wide = set(ranking[num_heads - wide_heads :].tolist())
    members = [[kv * group + i for i in range(group)] for kv in range(num_kv_heads)]
    chosen = [sum(head in wide for head in heads) for heads in members]
    if sum(0 < count < group for count in chosen) > 1:
        return HeadOrder(natural, natural_kv, ranking)
    kv_order = sorted(range(num_kv_heads), key=lambda kv: chosen[kv])
    rank = {head: position for position, head in enumerate(ranking.tolist())}
    heads = [head for kv in kv_order for head in sorted(members[kv], key=lambda head: rank[head])]
    return HeadOrder(torch.tensor(heads), torch.tensor(kv_order), None)


def fold_head_order(layer: LayerWeights, order: HeadOrder, head_dim: int) -> dict[str, Tensor]:
    """Reorder the rows of q, k, v and the columns of o_proj; per-channel statistics of K and V must be taken after."""
    folded = dict(layer)
    rows = {"q_proj": order.heads, "k_proj": order.kv_heads, "v_proj": order.kv_heads}
    for name, heads in rows.items():
        for kind in ("weight", "bias"):
            key = f"self_attn.{name}.{kind}"
            if key in layer:
                folded[key] = layer[key][_channels(heads, head_dim)]
    output = "self_attn.o_proj.weight"
    folded[output] = layer[output][:, _channels(order.heads, head_dim)]
    return folded


def _channels(heads: Tensor, head_dim: int) -> Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim, device=heads.device)).flatten()
