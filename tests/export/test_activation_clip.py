import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError
from w4a4.export import activation_clip
from w4a4.export.activation_clip import ABSMAX_FACTORS, RMS_FACTORS, search_clip
from w4a4.kernels.layout import LinearLayout, Segment
from w4a4.kernels.reference import quantize_symmetric


def _gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error(inputs: Tensor, weight: Tensor, clip: tuple[float, float]) -> float:
    codes, scale = quantize_symmetric(inputs, 4, clip)
    return float(((inputs - codes.float() * scale[:, None]) @ weight.T).square().sum())


@pytest.fixture
def layout() -> LinearLayout:
    return LinearLayout(40, (Segment(128, 4, 4),))


def test_it_is_about_the_best_of_the_grid(layout: LinearLayout) -> None:
    inputs, weight = _gaussian(64, 128), _gaussian(40, 128, seed=1)
    inputs[:, 3] *= 4
    found = _error(inputs, weight, search_clip(inputs, weight, layout))
    assert found < 1.005 * min(_error(inputs, weight, (c, beta)) for c in ABSMAX_FACTORS for beta in RMS_FACTORS)
    assert found < 0.95 * _error(inputs, weight, (1.0, math.inf))


def test_what_the_outputs_need_decides(layout: LinearLayout) -> None:
    """An outlier channel that the weight reads may not be clipped; the same one is clipped away if it is not read."""
    inputs, weight = _gaussian(64, 128), _gaussian(40, 128, seed=1)
    inputs[:, 3] = 12.0
    weight[:, 3] = 0
    c, beta = search_clip(inputs, weight, layout)
    assert min(c * 12, beta * float(inputs.square().mean().sqrt())) < 6
    weight[:, 3] = 10
    c, beta = search_clip(inputs, weight, layout)
    assert min(c * 12, beta * float(inputs.square().mean().sqrt())) > 11


def test_its_error_is_that_of_the_reference() -> None:
    inputs, weight = _gaussian(9, 64), _gaussian(5, 64, seed=1)
    inputs[4] = 0
    for clip in ((1.0, math.inf), (0.8, 2.5)):
        output = activation_clip._Part(inputs, weight.T).output_errors([clip])[0]
        assert float(output.square().sum()) == pytest.approx(_error(inputs, weight, clip), rel=1e-5)


def test_only_four_bit_segments_count(layout: LinearLayout) -> None:
    inputs, weight = _gaussian(64, 128), _gaussian(40, 128, seed=1)
    wide_inputs = torch.cat([inputs, _gaussian(64, 64, seed=2) * 100], 1)
    wide_weight = torch.cat([weight, _gaussian(40, 64, seed=3)], 1)
    mixed = replace(layout, segments=(Segment(128, 4, 4), Segment(64, 8, 8)))
    assert search_clip(wide_inputs, wide_weight, mixed) == search_clip(inputs, weight, layout)


def test_absmax_where_nothing_is_clipped(layout: LinearLayout) -> None:
    inputs, weight = _gaussian(8, 128), _gaussian(40, 128)
    for other in (
        replace(layout, symmetric=False),
        replace(layout, segments=(Segment(128, 8, 8),)),
        replace(layout, segments=(Segment(128, 16, 4),)),
    ):
        assert search_clip(inputs, weight, other) == (1.0, math.inf)


def test_token_weights_leave_tokens_out(layout: LinearLayout) -> None:
    inputs, weight = _gaussian(64, 128), _gaussian(40, 128, seed=1)
    loud = torch.cat([inputs, 1e3 * torch.sign(_gaussian(4, 128, seed=4))])
    weights = torch.cat([torch.ones(64), torch.zeros(4)])
    alone = search_clip(inputs, weight, layout)
    assert search_clip(loud, weight, layout, weights) == alone
    assert search_clip(loud, weight, layout) != alone


def test_the_projection_keeps_the_choice_nearly_as_good(monkeypatch: pytest.MonkeyPatch, layout: LinearLayout) -> None:
    inputs, weight = _gaussian(64, 128), _gaussian(600, 128, seed=1)
    inputs[:, 3] *= 4
    clip = search_clip(inputs, weight, layout)
    assert clip == search_clip(inputs, weight, layout)
    monkeypatch.setattr(activation_clip, "_SKETCH_ROWS", 600)
    best = search_clip(inputs, weight, layout)
    assert _error(inputs, weight, clip) < 1.01 * _error(inputs, weight, best)


def test_inputs_must_be_finite(layout: LinearLayout) -> None:
    with pytest.raises(NumericsError, match="not finite"):
        search_clip(torch.full((2, 128), float("nan")), torch.ones(40, 128), layout)
