"""The runner and the engine on top of it, against the same model scored in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import ResourceError
from w4a4.serve.cuda_graphs import DecodeGraphs, batch_buckets
from w4a4.serve.engine import Engine, EngineConfig
from w4a4.serve.model import CausalLM
from w4a4.serve.model_runner import ModelRunner, choose_act
from w4a4.serve.random_weights import RandomModel
from w4a4.serve.request import Output, Request, SamplingParams

CPU = torch.device("cpu")


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    return ModelConfig.from_hf(values | changes)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(RandomModel(tiny_config(), CPU))


def greedy(model: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """The answer without engine, pages that anybody shares, or batches."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model.score(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(runner: ModelRunner, prompts: list[list[int]], num_tokens: int, **config: object) -> list[list[int]]:
    import threading

    done = threading.Event()
    tokens: dict[str, list[int]] = {f"r{index}": [] for index in range(len(prompts))}
    finished: set[str] = set()

    def listen(outputs: list[Output]) -> None:
        for output in outputs:
            assert not output.error
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                finished.add(output.request_id)
        if len(finished) == len(prompts):
            done.set()

    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | config
    engine = Engine(runner, lambda ids, _: "x" * len(ids), EngineConfig(**settings), listen)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    engine.start()
    engine.submit([Request(f"r{index}", tuple(prompt), params) for index, prompt in enumerate(prompts)])
    assert done.wait(60)
    engine.shutdown()
    return list(tokens.values())


def prompts_of(lengths: list[int], shared: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    head = torch.randint(0, 300, (shared,), generator=generator).tolist()
    return [head + torch.randint(0, 300, (length,), generator=generator).tolist() for length in lengths]


class TestAnswers:
    def test_equal_those_of_the_model_alone(self, model: CausalLM) -> None:
        """Chunks of 32 tokens, mixed with decoding, four at a time of six, lengths around a page."""
        prompts = prompts_of([1, 15, 16, 17, 70, 3])
        runner = ModelRunner(model, max_num_seqs=4, kv_cache_bytes=1 << 22)
        assert answers(runner, prompts, 6) == [greedy(model, prompt, 6) for prompt in prompts]

    def test_do_not_change_with_a_prefix_from_the_cache(self, model: CausalLM) -> None:
        prompts = prompts_of([3, 5, 2, 9, 4, 7], shared=40)
        runner = ModelRunner(model, max_num_seqs=2, kv_cache_bytes=1 << 22)
        assert answers(runner, prompts, 4, max_num_seqs=2) == [greedy(model, prompt, 4) for prompt in prompts]

    def test_do_not_change_when_pages_run_out(self, model: CausalLM) -> None:
        page_bytes = model.kv_layout().page_bytes * 2
        runner = ModelRunner(model, max_num_seqs=4, max_model_len=96, kv_cache_bytes=(8 + 4) * page_bytes)
        assert runner.info.num_pages <= 8
        prompts = prompts_of([40, 41, 42, 43])
        assert answers(runner, prompts, 20) == [greedy(model, prompt, 20) for prompt in prompts]

    def test_do_not_change_through_the_buffers_of_decode_graphs(self, model: CausalLM) -> None:
        """On a CPU a graph is its buffers and a step: what a GPU adds is the capture."""
        prompts = prompts_of([1, 15, 30, 17, 40])
        runner = ModelRunner(model, max_num_seqs=4, kv_cache_bytes=1 << 22)
        runner.graphs = DecodeGraphs(model, runner.cache, batch_buckets(4), 32)
        assert answers(runner, prompts, 5) == [greedy(model, prompt, 5) for prompt in prompts]

    @pytest.mark.parametrize("has_graphs", [False, True])
    def test_do_not_change_when_steps_run_ahead(self, model: CausalLM, has_graphs: bool) -> None:
        prompts = prompts_of([1, 15, 30, 17, 40])
        runner = ModelRunner(model, max_num_seqs=4, kv_cache_bytes=1 << 22)
        runner._info = replace(runner.info, is_asynchronous=True)
        if has_graphs:
            runner.graphs = DecodeGraphs(model, runner.cache, batch_buckets(4), 32)
        assert answers(runner, prompts, 7) == [greedy(model, prompt, 7) for prompt in prompts]

    @pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"head_dim": 128, "tie_word_embeddings": True}])
    def test_of_other_shapes_and_16_bit_pages(self, changes: dict[str, object]) -> None:
        other = CausalLM(RandomModel(tiny_config(**changes), CPU), kv_bits=16)
        runner = ModelRunner(other, max_num_seqs=4, kv_cache_bytes=1 << 24)
        assert runner.info.num_sink_slots == 0
        prompts = prompts_of([5, 33])
        assert answers(runner, prompts, 4) == [greedy(other, prompt, 4) for prompt in prompts]


class TestSizes:
    def test_of_pages_and_sinks(self, model: CausalLM) -> None:
        layout = model.kv_layout()
        page_bytes = layout.page_bytes * model.config.num_layers
        info = ModelRunner(model, max_num_seqs=4, kv_cache_bytes=50 * page_bytes).info
        assert (info.num_pages, info.num_sink_slots) == (42, 8)
        assert info.max_model_len == 512
        assert info.page_size == 16 and info.vocab_size == 300 and not info.is_asynchronous
        assert info.path == "reference-cpu; KV 4 bit"

    def test_the_longest_request_is_what_fits(self, model: CausalLM) -> None:
        page_bytes = model.kv_layout().page_bytes * model.config.num_layers
        info = ModelRunner(model, max_num_seqs=4, kv_cache_bytes=14 * page_bytes).info
        assert info.max_model_len == 160
        assert (info.num_pages, info.num_sink_slots) == (10, 4)

    def test_refuses_what_does_not_fit(self, model: CausalLM) -> None:
        with pytest.raises(ResourceError, match="one request of 512 tokens needs"):
            ModelRunner(model, max_num_seqs=4, max_model_len=512, kv_cache_bytes=1 << 16)
        with pytest.raises(ResourceError):
            ModelRunner(model, max_num_seqs=4, kv_cache_bytes=100)


def test_explain_names_bits_and_kernel_of_every_launch(model: CausalLM) -> None:
    plans = ModelRunner(model, max_num_seqs=1, kv_cache_bytes=1 << 20).explain()
    assert [plan.name for plan in plans[:4]] == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert len(plans) == 8
    down = plans[3]
    assert (down.shape, down.weight_bits, down.act_bits) == ("256 x 384", "4 (256), 8 (128)", "4 (256), 8 (128)")
    assert down.kernel == "reference-cpu"


def test_explain_under_a8_tells_what_really_runs() -> None:
    forced = CausalLM(RandomModel(tiny_config(), CPU), act="a8")
    down = ModelRunner(forced, max_num_seqs=1, kv_cache_bytes=1 << 20).explain()[3]
    assert (down.weight_bits, down.act_bits) == ("4 (256), 8 (128)", "8")


def test_choices_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    is_available: Callable[[], bool] = lambda: False  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert choose_act(None, CPU) == "map"
    assert choose_act(None, torch.device("cuda")) == "a8"
    assert choose_act("map", torch.device("cuda")) == "map"


@pytest.mark.gpu
def test_on_a_gpu_graphs_give_what_launches_give_and_the_engine_answers() -> None:
    from w4a4.configs.shapes import shape_of
    from w4a4.serve.bench.first_layers import FirstLayers

    config, device = shape_of("llama3-8b"), torch.device("cuda:0")
    assert config is not None
    on_gpu = CausalLM(FirstLayers(RandomModel(config, device), 2, 4096, device), device, "a8")
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    prompts = prompts_of([5, 33, 70, 16], shared=40)
    both = []
    for is_eager in (True, False):
        runner = ModelRunner(on_gpu, gpu_memory_utilization=0.3, is_eager=is_eager, **sizes)  # type: ignore[arg-type]
        assert (runner.graphs is None) == is_eager
        both.append(answers(runner, prompts, 6, max_num_seqs=8, max_num_batched_tokens=64))
    # other kernels run for other numbers of rows, so a token may differ where two logits nearly tie
    pairs = [(a, b) for one, other in zip(*both, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.8 * len(pairs)
