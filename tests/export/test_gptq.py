from itertools import product

import pytest
import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.export.gptq import GptqResult, assemble, gptq
from w4a4.export.rounding import dequantize, group_scales, round_to_nearest, row_scales
from w4a4.kernels.layout import Segment

W4 = 4


def _problem(rows: int, columns: int, seed: int, tokens: int = 256, decay: float = 1.5) -> tuple[Tensor, Tensor]:
    """A weight [rows, columns] and the second moment of correlated inputs, the more so the larger `decay`."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator)
    spread = torch.logspace(0, -decay, columns)
    inputs = torch.randn(tokens, columns, generator=generator) * spread @ mixing
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / tokens


def _loss(weight: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    return (((weight - rounded) @ hessian) * (weight - rounded)).sum(1)


def _relative(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """tr((W - Q) H (W - Q)ᵀ) / tr(W H Wᵀ)."""
    return float(_loss(weight, rounded, hessian).sum() / _loss(weight, torch.zeros_like(weight), hessian).sum())


def _error(
    result: GptqResult, scales: Tensor, segments: list[Segment], weight: Tensor, hessian: Tensor, group_size: int = 0
) -> float:
    return _relative(weight, assemble(result.codes, scales, segments, group_size), hessian)


def _conditional_optimum(weight: Tensor, hessian: Tensor, scale: Tensor, order: list[int]) -> Tensor:
    """Round column after column; before each, put the columns still free at their least-squares optimum."""
    weight, hessian = weight.double(), hessian.double()
    rounded = weight.clone()
    for step, column in enumerate(order):
        fixed, free = order[:step], order[step:]
        if fixed:
            pushed = (weight - rounded)[:, fixed] @ hessian[fixed][:, free]
            rounded[:, free] = weight[:, free] + torch.linalg.solve(hessian[free][:, free], pushed.T).T
        rounded[:, column] = torch.round(rounded[:, column] / scale).clamp(-8, 7) * scale
    return rounded.float()


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_sequential_conditional_optimum(seed: int) -> None:
    weight, hessian = _problem(3, 12, seed)
    scale = row_scales(weight, W4, hessian.diagonal(), search=True)
    result = gptq(weight, hessian, scale[:, None], [Segment(12, 4, 4)], damping=0.0, block=5)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
    expected = _conditional_optimum(weight, hessian, scale.double(), order)
    torch.testing.assert_close(dequantize(result.codes[0], scale), expected, rtol=1e-5, atol=1e-5)


def test_against_the_brute_force_optimum() -> None:
    """K = 4, all 16^4 roundings: never better than the best, near it in total, and far better than plain rounding."""
    grid = torch.tensor(list(product(range(-8, 8), repeat=4))).float()
    found_total = best_total = nearest_total = 0.0
    for seed in range(12):
        weight, hessian = _problem(2, 4, seed, decay=0.7)
        scale = row_scales(weight, W4)
        nearest = dequantize(round_to_nearest(weight, scale, 4), scale)
        result = gptq(weight, hessian, scale[:, None], [Segment(4, 4, 4)], damping=0.0)
        found = _loss(weight, dequantize(result.codes[0], scale), hessian)
        for row in range(2):
            differences = weight[row] - grid * scale[row]
            best = ((differences @ hessian) * differences).sum(1).min()
            assert found[row] >= best * (1 - 1e-4)
            best_total += float(best)
        found_total += float(found.sum())
        nearest_total += float(_loss(weight, nearest, hessian).sum())
    assert found_total < 1.4 * best_total
    assert found_total < 0.5 * nearest_total


def test_diagonal_hessian_is_rounding_to_nearest() -> None:
    weight, _ = _problem(5, 40, 7)
    hessian = torch.diag(torch.rand(40, generator=torch.Generator().manual_seed(8)) + 0.1)
    scale = row_scales(weight, W4)
    result = gptq(weight, hessian, scale[:, None], [Segment(40, 4, 4)], block=16)
    assert torch.equal(result.codes[0], round_to_nearest(weight, scale, 4))


def test_weights_on_the_grid_are_exact() -> None:
    _, hessian = _problem(4, 64, 9)
    generator = torch.Generator().manual_seed(10)
    four = torch.randint(-8, 8, (4, 48), generator=generator).to(torch.int8)
    eight = torch.randint(-127, 128, (4, 16), generator=generator).to(torch.int8)
    scales = torch.rand(4, 2, generator=generator) + 0.1
    segments = [Segment(48, 4, 4), Segment(16, 8, 8)]
    result = gptq(assemble([four, eight], scales, segments), hessian, scales, segments)
    assert torch.equal(result.codes[0], four)
    assert torch.equal(result.codes[1], eight)


@pytest.mark.parametrize("act_order", [False, True])
def test_beats_rounding_in_the_norm_of_the_hessian(act_order: bool) -> None:
    weight, hessian = _problem(24, 200, 11, tokens=2000)
    scale = row_scales(weight, W4, hessian.diagonal(), search=True)
    result = gptq(weight, hessian, scale[:, None], [Segment(200, 4, 4)], act_order=act_order)
    nearest = dequantize(round_to_nearest(weight, scale, 4), scale)
    found = _error(result, scale[:, None], [Segment(200, 4, 4)], weight, hessian)
    assert found < 0.5 * _relative(weight, nearest, hessian)


def test_later_segments_receive_the_error() -> None:
    """16-bit columns leave nearly nothing of what int4 columns correlated with them lost; int8 columns are between."""
    weight, hessian = _problem(8, 64, 12)
    scales = torch.stack([row_scales(weight[:, :48], 4), row_scales(weight[:, 48:], 8)], 1)
    four, eight = [Segment(64, 4, 4)], [Segment(48, 4, 4), Segment(16, 8, 8)]
    sixteen = [Segment(48, 4, 4), Segment(16, 16, 16)]
    row = row_scales(weight, 4)[:, None]
    as_sixteen = gptq(weight, hessian, scales[:, :1], sixteen)
    assert as_sixteen.codes[1].dtype == torch.bfloat16
    assert not torch.equal(as_sixteen.codes[1].float(), weight[:, 48:].bfloat16().float())
    errors = [
        _error(as_sixteen, scales[:, :1], sixteen, weight, hessian),
        _error(gptq(weight, hessian, scales, eight), scales, eight, weight, hessian),
        _error(gptq(weight, hessian, row, four), row, four, weight, hessian),
    ]
    assert errors[0] < errors[1] * 1.001 < errors[2]
    uncompensated = torch.cat([dequantize(as_sixteen.codes[0], scales[:, 0]), weight[:, 48:]], 1)
    assert errors[0] < 0.9 * _relative(weight, uncompensated, hessian)


def test_block_size_changes_speed_only() -> None:
    weight, hessian = _problem(6, 90, 13)
    scale = row_scales(weight, W4)[:, None]
    whole = gptq(weight, hessian, scale, [Segment(90, 4, 4)], block=90)
    parts = gptq(weight, hessian, scale, [Segment(90, 4, 4)], block=7)
    assert (whole.codes[0] != parts.codes[0]).float().mean() < 0.01
    part_error, whole_error = (_error(r, scale, [Segment(90, 4, 4)], weight, hessian) for r in (parts, whole))
    assert part_error == pytest.approx(whole_error, rel=0.02)
    again = gptq(weight, hessian, scale, [Segment(90, 4, 4)], block=7)
    assert torch.equal(again.codes[0], parts.codes[0])


def test_group_scales() -> None:
    """A scale per group follows weights that shrink along the row; the codes of each group use its own scale."""
    weight, hessian = _problem(8, 128, 14)
    weight *= torch.logspace(0, -1.5, 4).repeat_interleave(32)
    segments = [Segment(128, 16, 4)]
    scales = group_scales(weight, 4, 32, hessian.diagonal(), search=True)
    grouped = gptq(weight, hessian, scales, segments, group_size=32)
    row_scale = row_scales(weight, 4, hessian.diagonal(), search=True)[:, None]
    row = gptq(weight, hessian, row_scale, segments)
    assert _error(grouped, scales, segments, weight, hessian, 32) < _error(row, row_scale, segments, weight, hessian)
    assert int(grouped.codes[0][:, 96:].abs().max()) > 2 * int(row.codes[0][:, 96:].abs().max())


def test_dead_channels_are_rounded_to_nearest() -> None:
    weight, hessian = _problem(4, 32, 15)
    hessian[5] = hessian[:, 5] = 0
    hessian[20] = hessian[:, 20] = 0
    scale = row_scales(weight, W4)
    result = gptq(weight, hessian, scale[:, None], [Segment(32, 4, 4)])
    nearest = round_to_nearest(weight, scale, 4)
    assert result.damping == 0.01
    assert torch.equal(result.codes[0][:, [5, 20]], nearest[:, [5, 20]])
    all_dead = gptq(weight, torch.zeros(32, 32), scale[:, None], [Segment(32, 4, 4)])
    assert torch.equal(all_dead.codes[0], nearest)


def test_singular_hessian_raises_the_damping_and_says_so() -> None:
    weight, _ = _problem(4, 32, 16)
    vector = torch.randn(32, generator=torch.Generator().manual_seed(17))
    hessian, scale = torch.outer(vector, vector), row_scales(weight, W4)[:, None]
    result = gptq(weight, hessian, scale, [Segment(32, 4, 4)], damping=0.0)
    assert 0 < result.damping < 0.1
    assert _error(result, scale, [Segment(32, 4, 4)], weight, hessian) < 0.01
    few = torch.randn(3, 32, generator=torch.Generator().manual_seed(18))
    usual = gptq(weight, few.T @ few, row_scales(weight, W4)[:, None], [Segment(32, 4, 4)])
    assert usual.damping == 0.01


def test_hessian_far_from_positive_is_refused() -> None:
    weight, hessian = _problem(2, 16, 19)
    hessian = hessian - 100 * hessian.diagonal().mean() * torch.ones(16, 16) * (1 - torch.eye(16))
    with pytest.raises(NumericsError, match="cannot be factored"):
        gptq(weight, hessian, row_scales(weight, W4)[:, None], [Segment(16, 4, 4)])


def test_inputs_are_left_alone() -> None:
    weight, hessian = _problem(3, 24, 20)
    copies = weight.clone(), hessian.clone()
    gptq(weight, hessian, row_scales(weight, W4)[:, None], [Segment(24, 4, 4)])
    assert torch.equal(weight, copies[0]) and torch.equal(hessian, copies[1])


def test_bad_input_is_named() -> None:
    weight, hessian = _problem(3, 24, 21)
    scale, segments = row_scales(weight, W4)[:, None], [Segment(24, 4, 4)]
    with pytest.raises(UsageError, match="add up to 24"):
        gptq(weight, hessian, scale, [Segment(16, 4, 4)])
    with pytest.raises(UsageError, match=r"\(24, 24\), got \(12, 12\)"):
        gptq(weight, hessian[:12, :12], scale, segments)
    with pytest.raises(UsageError, match="scales must be"):
        gptq(weight, hessian, scale.repeat(1, 2), segments)
    with pytest.raises(UsageError, match="groups of 7"):
        gptq(weight, hessian, scale, segments, group_size=7)
    with pytest.raises(NumericsError, match="above zero"):
        gptq(weight, hessian, scale * 0, segments)
    with pytest.raises(NumericsError, match="Hessian"):
        gptq(weight, hessian / 0, scale, segments)
    weight[1, 1] = float("nan")
    with pytest.raises(NumericsError, match="weight"):
        gptq(weight, hessian, scale, segments)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "widths"), [(40, (256, 64, 0)), (33, (200, 0, 24)), (960, (1024, 128, 64))])
def test_a_gpu_rounds_as_a_cpu_does(rows: int, widths: tuple[int, int, int]) -> None:
    """Sums in another order move what lies between two codes: hardly any, and the loss not at all."""
    segments = [Segment(n, min(b, 16), b) for n, b in zip(widths, (4, 8, 16), strict=True) if n]
    weight, hessian = _problem(rows, sum(widths), 21, tokens=4096, decay=1.0)
    starts = [0, widths[0], widths[0] + widths[1]]
    scales = torch.stack(
        [
            row_scales(weight[:, start : start + n], b)
            for start, n, b in zip(starts[:2], widths, (4, 8), strict=False)
            if n
        ],
        1,
    )
    expected = gptq(weight, hessian, scales, segments)
    found = gptq(weight.cuda(), hessian.cuda(), scales.cuda(), segments)
    moved = found.codes[0].cpu() != expected.codes[0]
    assert moved.float().mean() < 0.02
    rounded = assemble([code.cpu() for code in found.codes], scales, segments)
    assert _relative(weight, rounded, hessian) == pytest.approx(
        _error(expected, scales, segments, weight, hessian), rel=0.01
    )
    again = gptq(weight.cuda(), hessian.cuda(), scales.cuda(), segments)
    assert all(torch.equal(a, b) for a, b in zip(found.codes, again.codes, strict=True))
