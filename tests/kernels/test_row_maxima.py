"""Largest logits and their tokens equal those that PyTorch finds."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    """Few distinct values, so that there are ties."""
    generator = torch.Generator().manual_seed(rows + vocab)
    return torch.randint(-300, 300, (rows, vocab), generator=generator).float().cuda()


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("vocab", [300, 49_152, 128_256])
def test_equal_the_law(rows: int, vocab: int) -> None:
    from w4a4.kernels.row_maxima import advance_greedily, row_maxima

    logits = logits_of(rows, vocab)
    expected = logits.amax(-1)
    values, tokens = row_maxima(logits)
    assert torch.equal(values, expected)
    assert torch.equal(tokens, torch.stack([row.nonzero()[0, 0] for row in (logits == expected[:, None])]))
    chosen = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lengths = torch.arange(rows, dtype=torch.int32, device="cuda")
    advance_greedily(logits, chosen, lengths)
    assert torch.equal(chosen.long(), tokens)
    assert lengths.tolist() == list(range(1, rows + 1))


def test_logits_that_are_not_finite_are_noticed() -> None:
    from w4a4.kernels.row_maxima import row_maxima

    logits = logits_of(5, 9_000)
    logits[1, 8_999] = torch.nan
    logits[2, 17] = torch.inf
    logits[3] = -torch.inf
    assert torch.isfinite(row_maxima(logits)[0]).tolist() == [True, False, False, False, True]
    assert [part.shape for part in row_maxima(logits[:0])] == [(0,), (0,)]
