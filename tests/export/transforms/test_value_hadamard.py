import pytest
import torch

from w4a4.export.transforms.value_hadamard import fold_value_hadamard
from w4a4.kernels.reference import block_hadamard

TOLERANCE = 1e-4


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_logits_do_not_change(mini_model, tokens, has_bias: bool, head_dim: int) -> None:
    model = mini_model(has_bias=has_bias, head_dim=head_dim)
    before = model.logits(tokens)
    values = model.seen["v"]
    model.apply(lambda layer: fold_value_hadamard(layer, head_dim))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE
    torch.testing.assert_close(model.seen["v"], block_hadamard(values, head_dim & -head_dim), atol=1e-5, rtol=0)
