import pytest
import torch

from w4a4.calibrate.permutation import ChannelPermutation, magnitude_permutation
from w4a4.configs.errors import CheckpointError, UsageError


def test_the_largest_channels_come_last() -> None:
    magnitude = torch.tensor([5.0, 1, 9, 2, 2, 0, 7, 3])
    permutation = magnitude_permutation(magnitude, [6, 2])
    assert permutation.order.dtype == torch.int32
    assert permutation.order.tolist() == [5, 1, 3, 4, 7, 0, 6, 2]


def test_a_product_does_not_change() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 32, generator=generator), torch.randn(7, 32, generator=generator)
    order = magnitude_permutation(x.abs().amax(0), [24, 8], tp_max=2).order.long()
    torch.testing.assert_close(x[:, order] @ weight[:, order].T, x @ weight.T)


@pytest.mark.parametrize("tp_max", [1, 2, 4])
def test_slices_can_be_cut(tp_max: int) -> None:
    """Every rank finds its own strongest channels in its part of the last segment, and their sums add up."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 64, generator=generator), torch.randn(6, 64, generator=generator)
    magnitude = torch.rand(64, generator=generator)
    permutation = magnitude_permutation(magnitude, [48, 16], tp_max)
    width, total = 64 // tp_max, torch.zeros(3, 6)
    for rank in range(tp_max):
        columns = slice(rank * width, (rank + 1) * width)
        local = permutation.slice(rank)
        assert local.sort().values.tolist() == list(range(width))
        strongest = magnitude[columns][local][-16 // tp_max :]
        assert torch.equal(strongest, magnitude[columns].sort().values[-16 // tp_max :])
        total += x[:, columns][:, local] @ weight[:, columns][:, local].T
    torch.testing.assert_close(total, x @ weight.T, atol=1e-5, rtol=1e-5)


def test_bad_input_is_named() -> None:
    with pytest.raises(CheckpointError, match="repeats or misses"):
        ChannelPermutation(torch.tensor([0, 1, 1, 3]), (4,))
    with pytest.raises(CheckpointError, match="repeats or misses"):
        ChannelPermutation(torch.tensor([0, 1, 2, 4]), (4,))
    with pytest.raises(CheckpointError, match="block-diagonal over 2"):
        ChannelPermutation(torch.tensor([0, 2, 1, 3]), (4,), tp_max=2)
    with pytest.raises(CheckpointError, match=r"shape \(4,\), expected \[8\]"):
        ChannelPermutation(torch.arange(4), (8,))
    with pytest.raises(UsageError, match="add up to 8"):
        magnitude_permutation(torch.ones(8), [4, 2])
    with pytest.raises(UsageError, match="3 equal slices"):
        magnitude_permutation(torch.ones(8), [6, 2], tp_max=3)
