import pytest
import torch

from w4a4.export.transforms import ATTENTION_READERS, FFN_READERS
from w4a4.export.transforms.channel_balance import (
    balance_scales,
    fold_inner_balance,
    fold_norm_balance,
    fold_value_balance,
    grouped_scales,
)

TOLERANCE = 1e-4


def random_scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) * 3 + 0.2


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_do_not_change(mini_model, tokens, has_bias: bool) -> None:
    model = mini_model(has_bias=has_bias)
    before, seen = model.logits(tokens), model.seen
    hidden, values, inner = random_scales(model.hidden), random_scales(2, model.head_dim), random_scales(model.inner)
    model.apply(lambda layer: fold_norm_balance(layer, "input_layernorm", ATTENTION_READERS, hidden))
    model.apply(lambda layer: fold_norm_balance(layer, "post_attention_layernorm", FFN_READERS, 1 / hidden))
    model.apply(lambda layer: fold_value_balance(layer, values))
    model.apply(lambda layer: fold_inner_balance(layer, inner))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE
    torch.testing.assert_close(model.seen["v"] * values[:, None], seen["v"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.seen["h"] * inner, seen["h"], atol=1e-5, rtol=1e-5)


def test_scales_minimise_the_product_of_both_energies() -> None:
    generator = torch.Generator().manual_seed(0)
    energy = torch.rand(32, generator=generator) ** 4 + 0.01
    weight = torch.randn(20, 32, generator=generator) * torch.rand(32, generator=generator)

    def product(scales: torch.Tensor) -> float:
        return float((energy / scales.square()).sum() * (weight * scales).square().sum())

    scales = balance_scales(energy, weight)
    least = float((energy.sqrt() * weight.norm(dim=0)).sum() ** 2)
    assert product(scales) == pytest.approx(least, rel=1e-5)
    assert product(torch.ones(32)) > 1.5 * least
    assert float(scales.log().mean()) == pytest.approx(0, abs=1e-5)


def test_dead_channels_are_left_alone() -> None:
    energy, weight = torch.tensor([1.0, 0.0, 4.0, 9.0]), torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    scales = balance_scales(energy, weight)
    assert scales[1] == scales[2] == 1
    torch.testing.assert_close(scales[[0, 3]], torch.tensor([3**-0.25, 3**0.25]))
    assert torch.equal(balance_scales(torch.zeros(3), torch.ones(2, 3)), torch.ones(3))


def test_heads_of_a_group_share_scales() -> None:
    generator = torch.Generator().manual_seed(1)
    energy, weight = torch.rand(6 * 4, generator=generator) + 0.1, torch.randn(5, 6 * 4, generator=generator)
    scales = grouped_scales(energy, weight, 2, 4)
    per_group = weight.view(5, 2, 3, 4).permute(1, 0, 2, 3).reshape(2, 15, 4)
    rms = energy.view(2, 3, 4).sum(1).sqrt()
    expected = (rms / per_group.norm(dim=1)).sqrt()
    torch.testing.assert_close(scales / scales[0, 0], expected / expected[0, 0])
