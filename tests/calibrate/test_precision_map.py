import pytest
import torch

from w4a4.calibrate.precision_map import (
    PrecisionMap,
    block_size_of,
    outlier_channels,
    outlier_column_map,
    outlier_map,
    shared_map,
    spend,
    uniform_map,
    widest_share,
)
from w4a4.configs.errors import CheckpointError, UnsupportedError, UsageError


@pytest.mark.parametrize(("channels", "size"), [(4096, 128), (896, 128), (576, 64), (1536, 128), (96, 32), (8, 8)])
def test_block_size(channels: int, size: int) -> None:
    assert block_size_of(channels) == size


def test_widths() -> None:
    precision = PrecisionMap(64, (4, 4, 4, 8, 16))
    assert [precision.width(bits) for bits in (4, 8, 16)] == [192, 64, 64]
    assert [uniform_map(256, 8).width(bits) for bits in (4, 8, 16)] == [0, 256, 0]


def test_outliers_fill_as_few_blocks_as_they_can() -> None:
    magnitude = torch.ones(1024)
    magnitude[::8] = 20  # 128 outliers, in every block before a sort
    assert int(outlier_channels(magnitude, 6).sum()) == 128
    assert outlier_map(magnitude, 6, budget=0.5).bits == (4,) * 7 + (8,)
    magnitude[1] = 20
    assert outlier_map(magnitude, 6, budget=0.5).bits == (4,) * 6 + (8,) * 2
    assert outlier_map(magnitude, 6, budget=0.2).bits == (4,) * 7 + (8,)
    assert outlier_map(magnitude, 30, budget=0.5).bits == (4,) * 8
    assert outlier_map(magnitude, 6, budget=0).bits == (4,) * 8


def test_a_budget_counts_whole_blocks() -> None:
    assert [widest_share(1024, budget) for budget in (0.0, 0.01, 0.2, 0.25, 1.0)] == [0, 128, 128, 256, 1024]
    assert widest_share(576, 0.2) == 64
    everywhere = torch.arange(1.0, 1025)
    assert outlier_map(everywhere, 0.5, budget=0.25).width(8) == widest_share(1024, 0.25)


def test_slices_hold_their_own_outliers() -> None:
    magnitude = torch.ones(1024)
    magnitude[:100] = 20  # all in the first of two slices, where 64 fit half a block
    assert outlier_map(magnitude, 6, budget=1.0).width(8) == 128
    assert outlier_map(magnitude, 6, budget=1.0, tp_max=2).width(8) == 256


def test_a_small_linear_with_outliers_gets_one_block() -> None:
    magnitude = torch.ones(256)
    magnitude[7] = 50
    assert outlier_map(magnitude, 6, budget=0.2).bits == (4, 8)


@pytest.mark.parametrize(
    ("channels", "outliers", "base", "bits"),
    [
        (4096, 256, 4, (4,) * 30 + (16,) * 2),
        (576, 36, 4, (4,) * 8 + (16,)),
        (1024, 64, 8, (8,) * 7 + (16,)),
        (1024, 0, 4, (4,) * 8),
    ],
)
def test_outlier_columns(channels: int, outliers: int, base: int, bits: tuple[int, ...]) -> None:
    assert outlier_column_map(channels, outliers, base).bits == bits


def test_blocks_go_where_the_error_falls_most_per_mac() -> None:
    errors = [[9.0, 4.0, 3.0], [8.0, 7.5, 0.0], [1.0, 1.0, 1.0]]
    assert spend(errors, [10, 10, 10], 10) == [1, 0, 0]
    assert spend(errors, [10, 10, 10], 30) == [1, 2, 0]  # the second stage gains only from both of its blocks
    assert spend(errors, [10, 10, 10], 20) == [2, 0, 0]
    assert spend(errors, [100, 10, 10], 100) == [0, 2, 0]
    assert spend(errors, [10, 10, 10], 1000) == [2, 2, 0]
    assert spend(errors, [10, 10, 10], 9) == [0, 0, 0]
    assert spend([[1.0, 2.0, 1.5]], [1], 5) == [0]


def test_bad_input_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"holds \[5\]"):
        PrecisionMap(64, (4, 5))
    with pytest.raises(CheckpointError, match="must ascend"):
        PrecisionMap(64, (8, 4))
    with pytest.raises(UnsupportedError, match="100 inputs"):
        block_size_of(100)
    with pytest.raises(UsageError, match="512 of 256"):
        shared_map(256, 512)
