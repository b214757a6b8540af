"""Decode steps through fixed buffers: padding, sizes, and the feedback of greedy tokens. Captured graphs need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.shapes import shape_of
from w4a4.serve.bench.first_layers import FirstLayers
from w4a4.serve.cuda_graphs import DecodeGraph, DecodeGraphs, batch_buckets
from w4a4.serve.model import CausalLM, KVCache
from w4a4.serve.random_weights import RandomModel

CPU = torch.device("cpu")
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
LENGTHS = [5, 16, 33]  # tokens cached before the step


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 300, 1000])
def test_buckets_reach_the_largest_batch_in_small_steps(most: int) -> None:
    sizes = batch_buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for size, following in zip(sizes, sizes[1:], strict=False):
        assert following <= max(2 * size, size + 64)


def test_buckets_of_64() -> None:
    assert batch_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def prefilled(model: CausalLM) -> tuple[KVCache, Tensor, Tensor]:
    """Three sequences of `LENGTHS` in pages of a shuffled pool; their tokens (one more each) and tables."""
    generator = torch.Generator().manual_seed(0)
    cache = model.allocate_cache(12, 3)
    tables = torch.randperm(12, generator=generator).to(torch.int32).view(3, 4).to(model.device)
    tokens = torch.randint(0, model.config.vocab_size, (3, 64), generator=generator).to(model.device)
    ids = torch.cat([tokens[row, :length] for row, length in enumerate(LENGTHS)])
    starts = [0, 5, 21, 54]
    sinks = torch.arange(3, dtype=torch.int32, device=model.device)
    model.forward(ids, cache.known_batch(tables, starts, LENGTHS, sinks), cache)
    return cache, tokens, tables


def decoded(model: CausalLM) -> tuple[Tensor, Tensor]:
    """Logits of one decode step of three sequences, by graphs in a bucket of four and launch by launch."""
    cache, tokens, tables = prefilled(model)
    ids = torch.stack([tokens[row, length] for row, length in enumerate(LENGTHS)])
    lengths = torch.tensor([length + 1 for length in LENGTHS], dtype=torch.int32)
    sinks = torch.arange(3, dtype=torch.int32)
    graphs = DecodeGraphs(model, cache, [1, 4], table_width=6)
    graphs.step(ids.cpu().flip(0), lengths.flip(0), sinks.flip(0), tables.cpu().flip(0))  # another step before
    got = graphs.step(ids.cpu(), lengths, sinks, tables.cpu())
    batch = cache.decode_batch(tables, lengths.to(model.device), sinks.to(model.device))
    return got, model.logits(model.forward(ids, batch, cache))


@torch.inference_mode()
def test_a_padded_step_is_the_step() -> None:
    model = CausalLM(RandomModel(CONFIG, CPU))
    got, expected = decoded(model)
    assert torch.equal(got, expected)
    cache, tokens, tables = prefilled(model)
    pages = [page.clone() for page in cache.pages]
    DecodeGraph(model, cache, 2, 4).replay()  # every slot empty
    assert all(torch.equal(before, after) for before, after in zip(pages, cache.pages, strict=True))


@torch.inference_mode()
def test_greedy_tokens_feed_back() -> None:
    model = CausalLM(RandomModel(CONFIG, CPU))
    cache, tokens, tables = prefilled(model)
    graph = DecodeGraph(model, cache, 3, 4, is_greedy=True)
    graph.block_tables.copy_(tables)
    graph.sink_pages.copy_(torch.arange(3) + cache.num_pages)
    graph.context_lengths.copy_(torch.tensor(LENGTHS) + 1)
    graph.input_ids.copy_(torch.stack([tokens[row, length] for row, length in enumerate(LENGTHS)]))
    answers = []
    for _ in range(4):
        graph.replay()
        assert graph.next_tokens is not None
        answers.append(graph.next_tokens.clone())
    for row, length in enumerate(LENGTHS):
        sequence = tokens[row, : length + 1].tolist()
        for _ in range(4):
            sequence.append(int(model.score(torch.tensor([sequence]))[0, -1].argmax()))
        assert torch.stack(answers, 1)[row].tolist() == sequence[length + 1 :]


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_step_is_the_step() -> None:
    config = shape_of("llama3-8b")
    assert config is not None
    device = torch.device("cuda:0")
    model = CausalLM(FirstLayers(RandomModel(config, device), 2, 4096, device), device, "a8")
    got, expected = decoded(model)
    # split-KV attention sums in another order for another number of sequences
    assert (got - expected).norm() / expected.norm() < 0.02
