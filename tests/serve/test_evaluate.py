import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from w4a4.configs.errors import NumericsError, UsageError
from w4a4.serve import evaluate as evaluate_module
from w4a4.serve.evaluate import Evaluation, LazyLogits, evaluate, evaluate_all

VOCABULARY = 37


def table_model(seed: int, vocabulary: int = VOCABULARY, scale: float = 2.0) -> Callable[[Tensor], Tensor]:
    """A bigram model with a position-dependent term, so that swapped rows or windows show."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocabulary, vocabulary, generator=generator) * scale
    position = torch.randn(64, vocabulary, generator=generator)
    return lambda ids: table[ids] + position[: ids.shape[1]]


def random_ids(windows: int, length: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (windows, length), generator=torch.Generator().manual_seed(5))


def brute_force(
    model: Callable[[Tensor], Tensor], source: Callable[[Tensor], Tensor], ids: Tensor
) -> tuple[float, float, float, float]:
    """Loss, source loss, KL and agreement one token at a time with Python floats."""
    losses, source_losses, divergences, agreed = [], [], [], []
    for window in ids:
        rows, source_rows = (function(window[None])[0].tolist() for function in (model, source))
        for row, source_row, target in zip(rows[:-1], source_rows[:-1], window[1:].tolist(), strict=True):
            total, source_total = sum(map(math.exp, row)), sum(map(math.exp, source_row))
            p = [math.exp(value) / source_total for value in source_row]
            q = [math.exp(value) / total for value in row]
            losses.append(-math.log(q[target]))
            source_losses.append(-math.log(p[target]))
            divergences.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            agreed.append(row.index(max(row)) == source_row.index(max(source_row)))
    count = len(losses)
    return sum(losses) / count, sum(source_losses) / count, sum(divergences) / count, sum(agreed) / count


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("block", [1, 40, 1 << 20])
def test_equals_brute_force(batch: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "BLOCK_ELEMENTS", block)
    model, source, ids = table_model(1), table_model(2, scale=1.5), random_ids(5, 13)
    loss, source_loss, kl, agreement = brute_force(model, source, ids)
    found = evaluate(model, ids, source, batch=batch)
    assert (found.windows, found.window, found.tokens_scored) == (5, 13, 60)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.source_loss == pytest.approx(source_loss, rel=1e-6)
    assert found.kl == pytest.approx(kl, rel=1e-5)
    assert found.top1_agreement == agreement
    assert 0 < agreement < 1, "the case must be able to tell agreement from its opposite"
    assert found.ratio == pytest.approx(math.exp(loss - source_loss), rel=1e-6)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    found = evaluate(lambda ids: torch.zeros(*ids.shape, VOCABULARY), random_ids(2, 9))
    assert found.perplexity == pytest.approx(VOCABULARY, rel=1e-6)
    assert (found.source_loss, found.kl, found.top1_agreement, found.ratio) == (None, None, None, None)


def test_a_model_agrees_with_itself() -> None:
    found = evaluate(table_model(3), random_ids(4, 16), table_model(3))
    assert (found.ratio, found.kl, found.top1_agreement, found.log_ratio_stderr) == (1.0, 0.0, 1.0, 0.0)


def test_shifting_all_logits_changes_nothing() -> None:
    model, ids = table_model(3), random_ids(4, 16)
    shifted = evaluate(lambda chunk: model(chunk) + 1000.0, ids)
    assert shifted.loss == pytest.approx(evaluate(model, ids).loss, rel=1e-4)


def test_standard_error_is_that_of_window_means() -> None:
    model, source, ids = table_model(1), table_model(2), random_ids(6, 11)
    single = [evaluate(model, window[None], source) for window in ids]
    differences = torch.tensor([one.loss - (one.source_loss or 0.0) for one in single], dtype=torch.float64)
    expected = float(differences.std()) / math.sqrt(6)
    assert evaluate(model, ids, source).log_ratio_stderr == pytest.approx(expected, rel=1e-6)
    assert single[0].log_ratio_stderr is None


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    ids = random_ids(2, 9, 4096)
    found = evaluate(lambda chunk: torch.zeros(*chunk.shape, 4096, dtype=torch.bfloat16), ids)
    assert found.loss == pytest.approx(math.log(4096), rel=1e-6)


def test_lazy_logits_read_small_blocks_and_score_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "BLOCK_ELEMENTS", 4 * 500)
    embedding = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    read: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        read.append(hidden.shape[0] * hidden.shape[1])
        return hidden @ embedding.T

    ids = random_ids(3, 21, 500)
    lazy = evaluate(lambda chunk: LazyLogits(embedding[chunk], head), ids)
    whole = evaluate(lambda chunk: embedding[chunk] @ embedding.T, ids)
    assert lazy.loss == pytest.approx(whole.loss, rel=1e-6)
    assert max(read) == 4 and sum(read) == 3 * 20, "the last row of a window is never computed"


def test_source_runs_once_per_window_for_all_models() -> None:
    calls = []
    source = table_model(2)

    def counted(ids: Tensor) -> Tensor | LazyLogits:
        calls.append(len(ids))
        return source(ids)

    ids, done = random_ids(5, 8), []
    found = evaluate_all(
        {"a": table_model(1), "b": source}, ids, counted, batch=2, progress=lambda *step: done.append(step)
    )
    assert calls == [2, 2, 1]
    assert done == [(2, 5), (4, 5), (5, 5)]
    assert found["a"] == evaluate(table_model(1), ids, source, batch=2)
    assert found["b"].kl == 0.0


def test_json_carries_what_a_table_needs() -> None:
    document = json.loads(Evaluation(8, 2048, 16376, 2.0, 1.5, 0.25, 0.75, 0.01).to_json())
    assert document["tokens_scored"] == 16376
    assert document["perplexity"] == pytest.approx(math.e**2)
    assert document["ratio"] == pytest.approx(math.exp(0.5))
    assert (document["kl"], document["top1_agreement"]) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, 8, dtype=torch.int64), "nothing to score"),
        (torch.zeros(3, 1, dtype=torch.int64), "nothing to score"),
        (torch.zeros(8, dtype=torch.int64), "nothing to score"),
    ],
)
def test_bad_windows(ids: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(table_model(1), ids)


def test_bad_models() -> None:
    ids = random_ids(1, 8)
    with pytest.raises(UsageError, match="has 37 tokens, its source model 41"):
        evaluate(table_model(1), ids, table_model(1, vocabulary=41))
    with pytest.raises(UsageError, match="returned logits of shape"):
        evaluate(lambda chunk: torch.zeros(chunk.shape[0], VOCABULARY), ids)
    with pytest.raises(NumericsError, match="not finite"):
        evaluate(lambda chunk: torch.full((*chunk.shape, VOCABULARY), float("nan")), ids)
    with pytest.raises(UsageError, match="token 36 is beyond model's vocabulary of 36"):
        evaluate(lambda chunk: torch.zeros(*chunk.shape, 36), torch.full((1, 4), 36))
    with pytest.raises(UsageError, match="batch"):
        evaluate(table_model(1), ids, batch=0)
