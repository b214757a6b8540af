import pytest
import torch

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.transforms.norm_gain import fold_final_norm, fold_norm_gains
from w4a4.export.transforms.residual_basis import residual_basis, rotate_layer, rotate_rows

TOLERANCE = 1e-4


def _second_moment(width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator)
    x = torch.randn(400, width, generator=generator) * torch.logspace(1, -1, width) @ mixing
    return x.T @ x / 400


@pytest.mark.parametrize("mixed", [1, 8, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_do_not_change(mini_model, tokens, mixed: int, has_bias: bool) -> None:
    model = mini_model(has_bias=has_bias)
    before = model.logits(tokens)
    basis = residual_basis(_second_moment(80), 3, mixed)
    model.apply(lambda layer: rotate_layer(fold_norm_gains(layer), basis))
    model.final_gain, model.lm_head = fold_final_norm(model.final_gain, model.lm_head)
    model.embedding, model.lm_head = rotate_rows(model.embedding, basis), rotate_rows(model.lm_head, basis)
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE


@pytest.mark.parametrize(("width", "mixed", "block"), [(192, 64, 64), (80, 64, 16), (96, 8, 8), (7, 64, 1), (48, 1, 1)])
def test_blocks_of_principal_axes_ascend_and_do_not_mix(width: int, mixed: int, block: int) -> None:
    moment = _second_moment(width)
    basis = residual_basis(moment, 0, mixed)
    torch.testing.assert_close(basis.T @ basis, torch.eye(width), atol=1e-5, rtol=0)
    rotated = basis.T @ moment @ basis
    eigenvalues = torch.linalg.eigvalsh(moment.double()).view(-1, block).float()
    for index, values in enumerate(eigenvalues):
        rows = slice(index * block, (index + 1) * block)
        # equal weights of all axes of the block: every channel has their mean variance, whatever their signs
        torch.testing.assert_close(
            rotated.diagonal()[rows], values.mean().expand(block), rtol=1e-3, atol=1e-6 * float(eigenvalues.max())
        )
        rest = torch.cat([rotated[rows, : rows.start], rotated[rows, rows.stop :]], 1)
        assert rest.numel() == 0 or rest.abs().max() < 1e-5 * rotated.abs().max()


def test_seeds_decide_the_basis() -> None:
    moment = _second_moment(32)
    assert torch.equal(residual_basis(moment, 1), residual_basis(moment, 1))
    assert not torch.allclose(residual_basis(moment, 1), residual_basis(moment, 2))


def test_bad_input_is_named(mini_model) -> None:
    with pytest.raises(NumericsError, match="not finite"):
        residual_basis(torch.full((8, 8), float("nan")), 0)
    with pytest.raises(UsageError, match="still has a gain"):
        rotate_layer(mini_model().layers[0], torch.eye(80))
