import pytest
import torch

from w4a4.configs.errors import UsageError
from w4a4.export.transforms.key_scaling import fold_key_scaling, key_scales

TOLERANCE = 1e-4


def _energies(model) -> tuple[torch.Tensor, torch.Tensor]:
    key, query = model.seen["k"], model.seen["q"]
    return key.var(1, correction=0), query.square().mean(1)


@pytest.mark.parametrize(("has_bias", "has_qk_norm"), [(False, False), (True, False), (False, True), (True, True)])
def test_logits_do_not_change(mini_model, tokens, has_bias: bool, has_qk_norm: bool) -> None:
    model = mini_model(has_bias=has_bias, has_qk_norm=has_qk_norm)
    before = model.logits(tokens)
    scales = key_scales(*_energies(model), shared=has_qk_norm)
    assert scales.shape == (2, 8) and not torch.allclose(scales, torch.ones(2, 8))
    key = model.seen["k"]
    model.apply(lambda layer: fold_key_scaling(layer, scales))
    assert (model.logits(tokens) - before).abs().max() < TOLERANCE
    torch.testing.assert_close(model.seen["k"], key / torch.cat([scales, scales], 1)[:, None], atol=1e-4, rtol=0)


def test_keys_and_queries_meet_in_the_middle(mini_model, tokens) -> None:
    """After the fold, rms(k - mean k) / rms(q) is the same for every pair of a head."""
    model = mini_model(num_layers=1)
    model.logits(tokens)
    scales = key_scales(*_energies(model))
    torch.testing.assert_close(scales.log().mean(1), torch.zeros(2), atol=1e-6, rtol=0)
    model.apply(lambda layer: fold_key_scaling(layer, scales))
    model.logits(tokens)
    key, query = _energies(model)
    key_pairs = key.view(2, 2, 8).sum(1)
    query_pairs = query.view(2, 3, 2, 8).sum((1, 2))
    ratio = key_pairs / query_pairs
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-3, atol=0)


def test_dead_pairs_are_left_alone() -> None:
    key, query = torch.ones(1, 8), torch.full((2, 8), 4.0)
    key[0, [1, 5]] = 0
    query[:, [2, 6]] = 0
    scales = key_scales(key, query)
    assert torch.equal(scales[0, 1:3], torch.ones(2))
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert torch.equal(key_scales(torch.zeros(1, 8), query), torch.ones(1, 4))


def test_norms_need_shared_scales(mini_model) -> None:
    layer = mini_model(has_qk_norm=True).layers[0]
    with pytest.raises(UsageError, match="shared between kv-heads"):
        fold_key_scaling(layer, torch.tensor([[1.0] * 8, [2.0] * 8]))
