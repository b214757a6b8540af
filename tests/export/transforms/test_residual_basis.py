import pytest
import torch

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.transforms.norm_gain import fold_final_norm, fold_norm_gains
from w4a4.export.transforms.residual_basis import random_rotation, residual_basis, rotate_layer, rotate_rows

TOLERANCE = 1e-4


def _second_moment(width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator)
    x = torch.randn(400, width, generator=generator) * torch.logspace(1, -1, width) @ mixing
    return x.T @ x / 400


@pytest.mark.parametrize("wide", [0, 16, 80])
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_do_not_change(mini_model, tokens, wide: int, has_bias: bool) -> None:
    model = mini_model(has_bias=has_bias)
    before = model.logits(tokens)
    basis = residual_basis(_second_moment(80), wide, seed=3)
    model.apply(lambda layer: rotate_layer(fold_norm_gains(layer), basis))
    model.final_gain, model.lm_head = fold_final_norm(model.final_gain, model.lm_head)
    model.embedding, model.lm_head = rotate_rows(model.embedding, basis), rotate_rows(model.lm_head, basis)
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE


@pytest.mark.parametrize("width", [1, 2, 7, 48, 64, 576, 448])
def test_rotations_are_orthogonal_and_spread_a_single_channel(width: int) -> None:
    rotation = random_rotation(width, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width).double(), atol=1e-12, rtol=0)
    if width in (64, 576):
        assert rotation.abs().max() < 0.2


def test_the_last_channels_span_the_largest_variance() -> None:
    moment = _second_moment(48)
    basis = residual_basis(moment, 16, seed=0)
    rotated = basis.T @ moment @ basis
    largest = torch.linalg.eigvalsh(moment.double())[-16:].sum()
    assert float(rotated.diagonal()[-16:].sum()) == pytest.approx(float(largest), rel=1e-4)
    assert rotated[:32, 32:].abs().max() < 1e-3 * rotated.abs().max()  # the regions do not mix
    inside = rotated.diagonal()[:32]
    assert inside.max() / inside.mean() < 3  # evenly spread within a region


def test_seeds_decide_the_basis() -> None:
    moment = _second_moment(32)
    assert torch.equal(residual_basis(moment, 8, 1), residual_basis(moment, 8, 1))
    assert not torch.allclose(residual_basis(moment, 8, 1), residual_basis(moment, 8, 2))


def test_bad_input_is_named(mini_model) -> None:
    with pytest.raises(UsageError, match="cannot have 33 channels"):
        residual_basis(torch.eye(32), 33, 0)
    with pytest.raises(NumericsError, match="not finite"):
        residual_basis(torch.full((8, 8), float("nan")), 2, 0)
    with pytest.raises(UsageError, match="still has a gain"):
        rotate_layer(mini_model().layers[0], torch.eye(80))
