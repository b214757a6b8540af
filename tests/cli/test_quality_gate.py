from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from w4a4.calibrate.decoder import FloatModel
from w4a4.calibrate.source import open_source
from w4a4.cli.quality_gate import greedy, streamed_logits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_streamed_logits_are_those_of_the_model_in_memory(kind: str, model_folder: Callable[..., Path]) -> None:
    source = open_source(str(model_folder(kind)))
    tokens = torch.arange(20)[None] * 7 % 300
    streamed = streamed_logits(source, tokens, torch.device("cpu"))
    expected = FloatModel(source)(tokens)
    assert torch.allclose(streamed.rows(0, 20), expected, atol=1e-5)
    assert torch.allclose(streamed.rows(5, 9), expected[:, 5:9], atol=1e-5)


def test_greedy_takes_the_most_probable_token_each_time() -> None:
    def counting(tokens: torch.Tensor) -> torch.Tensor:
        """The next token is always the last one plus one."""
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()

    assert greedy(counting, [7], 4) == [7, 8, 9, 0, 1]
