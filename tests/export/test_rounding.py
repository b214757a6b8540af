import pytest
import torch

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.rounding import dequantize, group_scales, round_to_nearest, row_scales


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "highest"), [(4, 7), (8, 127)])
def test_absmax_maps_to_the_highest_code(bits: int, highest: int) -> None:
    weight = _weight(5, 33)
    scale = row_scales(weight, bits)
    torch.testing.assert_close(scale, weight.abs().amax(1) / highest)
    codes = round_to_nearest(weight, scale, bits)
    assert codes.dtype == torch.int8
    assert (codes.abs().amax(1) == highest).all()
    assert (dequantize(codes, scale) - weight).abs().amax() <= scale.max() / 2 * 1.0001


def test_values_on_the_grid_are_exact() -> None:
    codes = torch.randint(-8, 8, (6, 40), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale = torch.tensor([0.5, 0.25, 3.0, 1e-3, 7.0, 0.1])
    assert torch.equal(round_to_nearest(dequantize(codes, scale), scale, 4), codes)


def test_search_finds_the_best_scale_of_a_fine_brute_force_grid() -> None:
    weight, importance = _weight(4, 64, 2), torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.1

    def error(scale: torch.Tensor) -> torch.Tensor:
        return ((dequantize(round_to_nearest(weight, scale, 4), scale) - weight).square() * importance).sum(1)

    widest = row_scales(weight, 4)
    fine = torch.stack([error(widest * shrink) for shrink in torch.linspace(0.3, 1.0, 701)])
    found = error(row_scales(weight, 4, importance, search=True))
    assert (found <= error(widest)).all()
    assert (found <= fine.amin(0) * 1.03).all()
    assert (found.sum() < error(widest).sum() * 0.97).all()


def test_search_weights_columns_by_the_hessian_diagonal() -> None:
    weight = torch.full((1, 16), 0.1)
    weight[0, 0] = 1.0
    important = torch.ones(16)
    important[0] = 1e-6
    unimportant_outlier = row_scales(weight, 4, important, search=True)
    important[0] = 1e6
    important_outlier = row_scales(weight, 4, important, search=True)
    assert unimportant_outlier < important_outlier
    assert abs(float(dequantize(round_to_nearest(weight, important_outlier, 4), important_outlier)[0, 0]) - 1) < 0.01


def test_row_blocks_do_not_change_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(7, 48, 4)
    whole = row_scales(weight, 4, search=True)
    monkeypatch.setattr("w4a4.export.rounding._AT_A_TIME", 100)
    assert torch.equal(row_scales(weight, 4, search=True), whole)


def test_groups_are_rows_of_their_own() -> None:
    weight = _weight(3, 96, 5)
    scales = group_scales(weight, 4, 32, search=True)
    assert scales.shape == (3, 3)
    torch.testing.assert_close(scales[:, 1], row_scales(weight[:, 32:64], 4, search=True))
    codes = round_to_nearest(weight, scales, 4)
    torch.testing.assert_close(
        dequantize(codes, scales)[:, 64:], dequantize(codes[:, 64:], scales[:, 2]), rtol=0, atol=0
    )


def test_zero_rows_and_no_columns_get_a_tiny_scale() -> None:
    for search in (False, True):
        scale = row_scales(torch.zeros(2, 8), 4, search=search)
        assert (scale > 0).all() and (scale < 1e-6).all()
        assert not round_to_nearest(torch.zeros(2, 8), scale, 4).any()
    assert (row_scales(torch.zeros(2, 0), 8) > 0).all()


def test_bad_input_is_named() -> None:
    weight = _weight(2, 8)
    with pytest.raises(UsageError, match="4 or 8 bits, got 3"):
        row_scales(weight, 3)
    with pytest.raises(UsageError, match="groups of 3"):
        group_scales(weight, 4, 3)
    weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="1 values"):
        row_scales(weight, 4)
    with pytest.raises(NumericsError, match="Hessian diagonal"):
        row_scales(torch.ones(2, 8), 4, torch.full((8,), float("inf")), search=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(40, 576), (7, 2000)])
def test_a_gpu_finds_the_scales_that_a_cpu_finds(rows: int, columns: int) -> None:
    """To rounding; where two factors of the grid are as good, the order of a sum decides."""
    weight = _weight(rows, columns + 64, 5)[:, :columns]
    diagonal = torch.rand(columns, generator=torch.Generator().manual_seed(6))
    expected = row_scales(weight, 4, diagonal, search=True)
    found = row_scales(weight.cuda(), 4, diagonal.cuda(), search=True).cpu()
    assert ((found / expected - 1).abs() < 1e-5).float().mean() > 0.9
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
