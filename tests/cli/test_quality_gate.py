from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from w4a4.calibrate.decoder import FloatModel
from w4a4.calibrate.source import open_source
from w4a4.cli.quality_gate import greedy, streamed_logits
from w4a4.cli.scored_model import lazy_logits
from w4a4.serve.evaluate import LazyLogits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_streamed_logits_are_those_of_the_model_in_memory(kind: str, model_folder: Callable[..., Path]) -> None:
    source = open_source(str(model_folder(kind)))
    tokens = torch.arange(20)[None] * 7 % 300
    streamed = streamed_logits(source, tokens, torch.device("cpu"))
    expected = FloatModel(source)(tokens)
    assert torch.allclose(streamed.rows(0, 20), expected, atol=1e-5)
    assert torch.allclose(streamed.rows(5, 9), expected[:, 5:9], atol=1e-5)


def test_logits_a_few_rows_at_a_time_are_the_same(model_folder: Callable[..., Path]) -> None:
    model = FloatModel(open_source(str(model_folder("llama"))))
    tokens = torch.arange(40).view(2, 20) * 7 % 300
    lazy = lazy_logits(model)(tokens)
    assert torch.allclose(lazy.rows(3, 9), model(tokens)[:, 3:9], atol=1e-6)
    assert lazy.rows(0, 1).shape == (2, 1, 300)


def test_logits_that_are_kept_do_not_keep_the_layers(model_folder: Callable[..., Path]) -> None:
    model = FloatModel(open_source(str(model_folder("llama"))))
    layer = weakref.ref(model.layers[0]["self_attn.q_proj.weight"])
    lazy = lazy_logits(model)(torch.arange(20)[None])
    expected = model(torch.arange(20)[None])
    del model
    gc.collect()
    assert layer() is None
    assert torch.allclose(lazy.rows(0, 20), expected, atol=1e-6)


def test_greedy_takes_the_most_probable_token_each_time() -> None:
    def counting(tokens: torch.Tensor) -> LazyLogits:
        """The next token is always the last one plus one."""
        return LazyLogits(torch.nn.functional.one_hot((tokens + 1) % 10, 10).float(), lambda rows: rows)

    assert greedy(counting, [7], 4) == [7, 8, 9, 0, 1]
