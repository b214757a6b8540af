"""Which prompts get a plan, and that rounding their length up changes nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from w4a4.kernels import prompt_attention
from w4a4.kernels.prompt_attention import attend_causally, attend_planned, is_planned, rounded_length


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "_seen", prompt_attention._Seen())


def test_lengths_round_up_to_few() -> None:
    assert [rounded_length(n) for n in (1, 64, 65, 512, 513, 1000, 1024, 1025, 8191)] == [
        64, 64, 128, 512, 576, 1024, 1024, 1152, 8192,
    ]  # fmt: skip
    lengths = {rounded_length(n) for n in range(513, 8193)}
    assert len(lengths) == 32 and all(length % 64 == 0 for length in lengths)
    assert all(n <= rounded_length(n) <= 1.125 * n for n in range(512, 9000))


def test_a_shape_is_planned_once_it_recurs() -> None:
    """By its operations: 2 of 7e10 a call are not enough, 100 are; another shape or thread starts anew."""
    calls = [is_planned(8, 32, 1024, 128) for _ in range(100)]
    assert not calls[1] and calls[-1] and calls == sorted(calls)
    assert not is_planned(7, 32, 1024, 128)
    assert is_planned(1, 64, 65536, 128)  # alone costs more than a plan
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(is_planned(8, 32, 1024, 128)))
    thread.start()
    thread.join()
    assert elsewhere == [False]


def test_short_prompts_and_wide_heads_are_never_planned() -> None:
    assert not any(is_planned(1, 32, 1024, 128) for _ in range(10_000))
    assert not any(is_planned(64, 64, 2048, 256) for _ in range(100))


@pytest.mark.parametrize(("tokens", "length"), [(64, 64), (50, 64)])
def test_a_rounded_prompt_is_the_prompt(tokens: int, length: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(2, tokens, 4, 16, generator=generator)
    keys, values = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(2))
    expected = attend_causally(q, keys[:, :, :tokens], values[:, :, :tokens], 0.25, None)
    torch.testing.assert_close(attend_planned(q, keys, values, 0.25), expected, rtol=1e-5, atol=1e-5)
