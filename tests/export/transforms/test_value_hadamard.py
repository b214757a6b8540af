import pytest
import torch

from w4a4.export.transforms.value_hadamard import fold_head_order, fold_value_hadamard, head_energy, order_heads
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


@pytest.mark.parametrize(
    ("energy", "wide", "folds", "last"),
    [
        ([9, 8, 7, 1, 2, 3], 3, True, {0, 1, 2}),  # a whole group
        ([9, 1, 8, 2, 3, 4], 2, True, {0, 2}),  # part of one group
        ([9, 8, 7, 1, 6, 2], 4, True, {0, 1, 2, 4}),  # a whole group and part of the other
        ([9, 1, 2, 3, 8, 4], 2, False, {0, 4}),  # parts of two groups
        ([9, 1, 2, 3, 8, 4], 0, True, set()),
    ],
)
def test_the_strongest_heads_come_last(energy: list[int], wide: int, folds: bool, last: set[int]) -> None:
    order = order_heads(torch.tensor(energy), 2, wide)
    assert (order.input_heads is None) == folds
    stored = order.heads if order.input_heads is None else order.heads[order.input_heads]
    assert sorted(stored.tolist()) == list(range(6))
    assert set(stored[6 - wide :].tolist()) == last
    if not folds:
        assert order.heads.tolist() == list(range(6)) and order.kv_heads.tolist() == [0, 1]
        perm = order.input_permutation(4)
        assert perm is not None and perm.dtype == torch.int32
        assert perm[-8:].tolist() == [16, 17, 18, 19, 0, 1, 2, 3]


@pytest.mark.parametrize("has_bias", [False, True])
def test_folding_an_order_moves_heads_and_nothing_else(mini_model, tokens, has_bias: bool) -> None:
    model = mini_model(has_bias=has_bias)
    before = model.logits(tokens)
    energy, output = torch.tensor([2.0, 9, 1, 5, 3, 4]), model.seen["o"]
    order = order_heads(energy, 2, 1)
    assert order.kv_heads.tolist() == [1, 0] and order.heads.tolist()[-1] == 1
    model.apply(lambda layer: fold_head_order(layer, order, 16))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE
    # only the last layer's input is the same up to rounding, and it arrives head by head in the new order
    torch.testing.assert_close(
        model.seen["o"].unflatten(1, (6, 16)), output.unflatten(1, (6, 16))[:, order.heads], atol=1e-4, rtol=0
    )


def test_energy_of_a_head_is_that_of_its_share_of_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    output, weight = torch.randn(4000, 12, generator=generator), torch.randn(5, 12, generator=generator)
    energy = head_energy(output.square().mean(0), weight, 4)
    assert energy.shape == (3,)
    measured = torch.stack([(output[:, i : i + 4] @ weight[:, i : i + 4].T).square().sum(1).mean() for i in (0, 4, 8)])
    torch.testing.assert_close(energy, measured, rtol=0.1, atol=0)
