import pytest
import torch

from w4a4.export.transforms.value_hadamard import fold_value_hadamard, head_energy
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


def test_energy_of_a_head_is_that_of_its_share_of_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    output, weight = torch.randn(4000, 12, generator=generator), torch.randn(5, 12, generator=generator)
    energy = head_energy(output.square().mean(0), weight, 4)
    assert energy.shape == (3,)
    measured = torch.stack([(output[:, i : i + 4] @ weight[:, i : i + 4].T).square().sum(1).mean() for i in (0, 4, 8)])
    torch.testing.assert_close(energy, measured, rtol=0.1, atol=0)
