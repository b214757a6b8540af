import pytest
import torch

from w4a4.export.transforms.value_mean import fold_value_mean

TOLERANCE = 1e-4


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_do_not_change(mini_model, tokens, has_bias: bool) -> None:
    model = mini_model(has_bias=has_bias)
    before = model.logits(tokens)
    mean = model.seen["v"].mean(1)
    assert mean.abs().max() > 0.05
    model.apply(lambda layer: fold_value_mean(layer, mean, num_heads=6))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE
    torch.testing.assert_close(model.seen["v"].mean(1), torch.zeros(2, 16), atol=1e-5, rtol=0)
