from __future__ import annotations

import pytest
import torch

from w4a4.configs.architecture import ModelConfig
from w4a4.serve.bench import fixed_batch
from w4a4.serve.bench.fixed_batch import FixedBatch, fill_random
from w4a4.serve.model import CausalLM
from w4a4.serve.random_weights import RandomModel

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(RandomModel(CONFIG, torch.device("cpu")))


@pytest.mark.parametrize("at_once", [512, 40, 16])
def test_prefill_is_the_model_whatever_the_chunks(
    model: CausalLM, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences in one step, one at a time, and in pieces of one."""
    monkeypatch.setattr(fixed_batch, "CPU_PREFILL_TOKENS", at_once)
    run = FixedBatch(model, 3, 48)
    assert torch.equal(run.prefill(33), model.score(run.tokens[:, :33])[:, -1])


def test_decode_continues_greedily_from_the_pages(model: CausalLM) -> None:
    run = FixedBatch(model, 3, 48)
    run.prefill(20)
    run.seek(20)
    logits = run.decode(4)
    tokens = run.tokens[:, :21]
    for _ in range(3):
        tokens = torch.cat([tokens, model.score(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(logits, model.score(tokens)[:, -1])


def test_room_is_respected(model: CausalLM) -> None:
    run = FixedBatch(model, 1, 20)
    with pytest.raises(ValueError, match="context must be 1 to 19"):
        run.seek(20)
    run.seek(18)
    with pytest.raises(ValueError, match="exceed the room"):
        run.decode(3)


@pytest.mark.parametrize("bits", [4, 16])
def test_random_pages_are_finite_and_have_the_size_of_real_ones(bits: int) -> None:
    other = CausalLM(RandomModel(CONFIG, torch.device("cpu")), kv_bits=bits)
    run = FixedBatch(other, 2, 64)
    run.seek(50)
    logits = run.decode(1)
    assert logits.isfinite().all()
    first = run.cache.pages[0].clone()
    assert first.float().std() > 10, "bytes must not be constant"
    fill_random(run.cache, seed=1)
    assert not torch.equal(first, run.cache.pages[0])
