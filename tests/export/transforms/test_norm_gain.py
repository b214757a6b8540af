import pytest
import torch

from w4a4.export.transforms.norm_gain import fold_final_norm, fold_norm_gains

TOLERANCE = 1e-4


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_logits_do_not_change(mini_model, tokens, has_bias: bool, has_qk_norm: bool) -> None:
    model = mini_model(has_bias=has_bias, has_qk_norm=has_qk_norm)
    before = model.logits(tokens)
    model.apply(fold_norm_gains)
    model.final_gain, model.lm_head = fold_final_norm(model.final_gain, model.lm_head)
    for layer in model.layers:
        assert torch.equal(layer["input_layernorm.weight"], torch.ones(80))
        assert torch.equal(layer["post_attention_layernorm.weight"], torch.ones(80))
    assert torch.equal(model.final_gain, torch.ones(80))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE


def test_the_input_is_left_alone(mini_model) -> None:
    layer = mini_model().layers[0]
    copy = {name: tensor.clone() for name, tensor in layer.items()}
    fold_norm_gains(layer)
    assert all(torch.equal(layer[name], copy[name]) for name in copy)
