import pytest
import torch

from w4a4.export.transforms.ffn_order import channel_order, fold_channel_order

TOLERANCE = 1e-4


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_do_not_change(mini_model, tokens, has_bias: bool) -> None:
    model = mini_model(has_bias=has_bias)
    before = model.logits(tokens)
    inner = model.seen["h"]
    order = channel_order(inner.square().mean(0), model.layers[-1]["mlp.down_proj.weight"])
    model.apply(lambda layer: fold_channel_order(layer, order))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE
    torch.testing.assert_close(model.seen["h"], inner[:, order], atol=1e-5, rtol=0)


def test_the_strongest_share_of_the_output_is_last() -> None:
    energy = torch.tensor([4.0, 1.0, 1.0, 0.0])
    weight = torch.tensor([[1.0, 1.0, 3.0, 100.0]])
    assert channel_order(energy, weight).tolist() == [3, 1, 0, 2]
