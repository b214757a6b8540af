"""Exact changes of a model's weights that leave its outputs alone and make them easier to quantise.

Each file holds one transform: a pure function from a layer's weights to new weights. A layer is a mapping from the
short Hugging Face name ("self_attn.q_proj.weight") to a float tensor; what a function leaves alone is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LayerWeights = Mapping[str, Tensor]

ATTENTION_READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FFN_READERS = ("mlp.gate_proj", "mlp.up_proj")
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
