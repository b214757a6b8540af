import math

import pytest
import torch

from w4a4.serve.detokenizer import Detokenizer
from w4a4.serve.request import Request, SamplingParams, Sequence
from w4a4.serve.sampler import Sampler

VOCAB = 40


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: object) -> Sequence:
    request = Request("r", tuple(prompt or [1]), SamplingParams(**params))  # type: ignore[arg-type]
    result = Sequence(request, 100, frozenset({3}), Detokenizer(lambda ids: ""))
    result.tokens += output or []
    return result


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(row: torch.Tensor, count: int = 4000, **params: object) -> torch.Tensor:
    drawn = Sampler(VOCAB, seed=1).sample(row.repeat(count, 1), [sequence(**params)] * count)
    return torch.bincount(torch.tensor([result.token for result in drawn]), minlength=VOCAB) / count


def assert_close(measured: torch.Tensor, expected: torch.Tensor, count: int = 4000) -> None:
    sigma = (expected * (1 - expected) / count).sqrt()
    assert ((measured - expected).abs() <= 5 * sigma + 1e-9).all(), (measured - expected).abs().max()
    assert (measured[expected == 0] == 0).all()


def test_greedy_is_the_exact_argmax() -> None:
    rows = logits(64)
    sampled = Sampler(VOCAB).sample(rows.clone(), [sequence(temperature=0.0) for _ in range(64)])
    assert [result.token for result in sampled] == rows.argmax(-1).tolist()


def test_temperature_draws_from_the_softmax() -> None:
    row = logits()[0]
    assert_close(frequencies(row, temperature=0.7), torch.softmax(row / 0.7, -1))


def test_top_k_top_p_and_min_p() -> None:
    row = logits(seed=3)[0]
    probabilities = torch.softmax(row, -1)
    order = probabilities.argsort(descending=True)

    expected = torch.zeros(VOCAB)
    expected[order[:5]] = probabilities[order[:5]]
    assert_close(frequencies(row, top_k=5), expected / expected.sum())

    kept = int((probabilities[order].cumsum(0) < 0.8).sum()) + 1
    expected = torch.zeros(VOCAB)
    expected[order[:kept]] = probabilities[order[:kept]]
    assert_close(frequencies(row, top_p=0.8), expected / expected.sum())

    expected = torch.where(probabilities >= 0.1 * probabilities.max(), probabilities, 0.0)
    assert_close(frequencies(row, min_p=0.1), expected / expected.sum())

    # top_p of what top_k leaves
    best = probabilities[order[:4]] / probabilities[order[:4]].sum()
    kept = int((best.cumsum(0) < 0.6).sum()) + 1
    expected = torch.zeros(VOCAB)
    expected[order[:kept]] = best[:kept]
    assert_close(frequencies(row, top_k=4, top_p=0.6), expected / expected.sum())


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_the_tightest_limit_is_greedy(params: dict[str, float]) -> None:
    row = logits(seed=5)
    assert [
        result.token for result in Sampler(VOCAB).sample(row.repeat(50, 1), [sequence(**params) for _ in range(50)])
    ] == [int(row.argmax())] * 50


def test_a_seed_gives_the_same_answer_whatever_else_is_in_the_batch() -> None:
    rows = logits(30, seed=7)

    def draw(companions: int, sampler: Sampler) -> list[int]:
        seeded = sequence(seed=42, temperature=1.5)
        tokens = []
        for step in range(30):
            others = [sequence(temperature=1.0) for _ in range(companions)] + [sequence(temperature=0.0)] * (
                companions > 2
            )
            batch = (
                torch.cat([logits(len(others), seed=step), rows[step : step + 1]]) if others else rows[step : step + 1]
            )
            tokens.append(sampler.sample(batch.clone(), [*others, seeded])[-1].token)
        return tokens

    alone = draw(0, Sampler(VOCAB))
    assert alone == draw(1, Sampler(VOCAB, 3)) == draw(5, Sampler(VOCAB, 4))
    assert len(set(alone)) > 5


def test_penalties_match_their_formulas() -> None:
    row = logits(seed=9)
    prompt, answer = [4, 4, 5], [6, 6, 6, 4]
    target = sequence(
        prompt,
        answer,
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logprobs=0,
    )
    expected = row[0].clone()
    for token in {4, 5, 6}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[6] -= 0.25 * 3 + 0.5
    expected[4] -= 0.25 * 1 + 0.5
    shaped = row.clone()
    sampler = Sampler(VOCAB)
    sampled = sampler.sample(shaped, [target])[0]
    torch.testing.assert_close(shaped[0], expected)
    # log-probabilities are of the raw logits
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(torch.log_softmax(row[0], -1)[sampled.token].item(), abs=1e-6)
    # the counts grow with the answer
    target.tokens.append(6)
    again = row.clone()
    sampler.sample(again, [target])
    expected[6] -= 0.25
    torch.testing.assert_close(again[0], expected)


def test_a_strong_penalty_changes_the_greedy_token() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 7], row[0, 8] = 2.0, 1.0
    sampler = Sampler(VOCAB)
    assert sampler.sample(row.clone(), [sequence(output=[7], temperature=0.0, presence_penalty=1.5)])[0].token == 8


def test_logit_bias_and_min_tokens() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 3] = 9.0  # EOS
    sampler = Sampler(VOCAB)
    assert sampler.sample(row.clone(), [sequence(temperature=0.0, logit_bias={11: 50.0, 3: -100.0})])[0].token == 11
    target = sequence(temperature=0.0, min_tokens=2, logit_bias={12: 1.0})
    tokens = []
    for _ in range(3):
        token = sampler.sample(row.clone(), [target])[0].token
        tokens.append(token)
        target.tokens.append(token)
    assert tokens == [12, 12, 3]


def test_logprobs_are_the_best_in_order() -> None:
    rows = logits(3, seed=11)
    sampled = Sampler(VOCAB).sample(
        rows.clone(),
        [sequence(temperature=0.0, logprobs=4), sequence(temperature=0.0), sequence(temperature=0.0, logprobs=0)],
    )
    expected = torch.log_softmax(rows, -1)
    first = sampled[0].logprob
    assert first is not None and len(first.top) == 4
    values, ids = expected[0].topk(4)
    assert [token for token, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist())
    assert sampled[1].logprob is None
    assert sampled[2].logprob is not None and sampled[2].logprob.top == ()


def test_rows_that_are_not_finite_are_told_apart() -> None:
    rows = logits(4)
    rows[1, 5] = math.nan
    rows[2, 6] = math.inf
    rows[3] = -math.inf
    sampled = Sampler(VOCAB).sample(rows, [sequence(temperature=value) for value in (1.0, 1.0, 0.0, 1.0)])
    assert [result.is_finite for result in sampled] == [True, False, False, False]
    assert all(0 <= result.token < VOCAB for result in sampled)
