"""The tests of a whole model on a CPU, with baselines, and the correctness check before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import NumericsError, UsageError
from w4a4.serve.bench import check, run
from w4a4.serve.bench.check import check_model
from w4a4.serve.bench.first_layers import FirstLayers
from w4a4.serve.bench.memory import kv_token_bytes, largest_batch, linear_bytes, model_bytes
from w4a4.serve.bench.run import BenchSettings, run_all
from w4a4.serve.model import CausalLM
from w4a4.serve.random_weights import RandomLinear, RandomModel

CPU = torch.device("cpu")
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
)


def test_every_test_of_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COMBINED_GEN", 3)
    monkeypatch.setattr(run, "largest_batch", lambda model, tokens: 2)
    settings = BenchSettings(seq=20, gen=4, batches=(1, 2, "max"), baselines=("bf16",), repetitions=2)
    seen: list[str] = []
    records = run_all(
        RandomModel(CONFIG, CPU), "tiny", CPU, settings, on_record=lambda record: seen.append(record.test)
    )
    assert seen == ["pp20", "pp20", "tg4@20", "tg4@20", "pp20+tg3"] * 2
    ours, theirs = records[:5], records[5:]
    assert {record.recipe for record in ours} == {"dual"} and {record.recipe for record in theirs} == {"baseline"}
    assert [record.batch for record in ours] == [1, 2, 1, 2, 2]
    for own, other in zip(ours, theirs, strict=True):
        assert own.baselines == {"bf16": other.tok_s}
    decode = ours[3]
    assert decode.tok_s == pytest.approx(2 * 1e3 / decode.step_ms)
    prefill = ours[1]
    assert prefill.tok_s == pytest.approx(40 * 1e3 / prefill.step_ms)
    combined = ours[4]
    assert (combined.gen, combined.repetitions, combined.composed, combined.step_ms) == (3, 1, False, None)
    assert ours[0].kv == 4 and theirs[0].kv == 16 and theirs[0].path == "float32-cpu"


def test_a_batch_too_large_to_run_in_one_go_is_composed_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COMBINED_GEN", 24)
    monkeypatch.setattr(run, "RUN_IN_ONE_GO", 1)
    monkeypatch.setattr(run, "SAMPLE_SEQUENCES", 1)
    monkeypatch.setattr(run, "largest_batch", lambda model, tokens: 4)
    (record,) = run_all(RandomModel(CONFIG, CPU), "tiny", CPU, BenchSettings(seq=16, batches=("max",), repetitions=1))
    assert record.composed and record.batch == 4
    assert record.step_ms is None and record.gen == 24 and record.tok_s > 0


@pytest.mark.parametrize(
    "changes", [{"seq": 0}, {"batches": ()}, {"batches": (0,)}, {"baselines": ("int3",)}, {"repetitions": 0}]
)
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchSettings(**changes)


def test_memory_counts_packed_bytes() -> None:
    model = CausalLM(RandomModel(CONFIG, CPU))
    linears = sum(rows * columns for rows, columns in CONFIG.linear_shapes().values()) * 3
    assert linear_bytes(model) == linears  # int8 on a CPU
    assert model_bytes(model) == linears + 300 * 256 * (4 + 2)  # the embedding stays as stored
    assert kv_token_bytes(model) == 3 * 2 * 2 * (64 / 2 + 4)
    pages = 1 + 20 // 16 + 1  # with the sink page
    assert largest_batch(model, 20) == (1 << 30) // (pages * 16 * 3 * 2 * 2 * 36) // 128 * 128


class TestCheck:
    def test_the_reference_agrees_with_itself(self) -> None:
        result = check_model(RandomModel(CONFIG, CPU), CPU, "map", None)
        assert (result.relative_error, result.top1, result.layers) == (0.0, 1.0, 2)
        assert result.tokens == 3 * check.NUM_DECODED

    def test_finds_weights_that_the_device_holds_wrongly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The model that is timed has the scales of its feed-forward rows in reverse order."""
        real = check.FirstLayers

        def broken(packed: Any, layers: int, vocabulary: int, device: torch.device) -> Any:
            first = real(packed, layers, vocabulary, device)
            broken_once.append(first)
            return Scaled(first) if len(broken_once) == 1 else first

        broken_once: list[FirstLayers] = []
        monkeypatch.setattr(check, "FirstLayers", broken)
        with pytest.raises(NumericsError, match="what would be timed is wrong"):
            check_model(RandomModel(CONFIG, CPU), CPU, "map", None)

    def test_a_part_of_a_model_is_a_model(self) -> None:
        part = FirstLayers(RandomModel(CONFIG, CPU), 1, 100, CPU)
        assert (part.config.num_layers, part.config.vocab_size, len(part.config.sliding_windows)) == (1, 100, 1)
        whole = RandomModel(CONFIG, CPU)
        assert torch.equal(part.tensor("lm_head.weight"), whole.tensor("lm_head.weight")[:100])
        assert CausalLM(part).score(torch.arange(8)[None]).shape == (1, 8, 100)


@dataclass(frozen=True)
class Scaled:
    """A model with the row scales of its feed-forward in reverse order."""

    packed: FirstLayers

    @property
    def config(self) -> ModelConfig:
        return self.packed.config

    @property
    def quantization(self) -> Mapping[str, Any]:
        return self.packed.quantization

    def linear(self, prefix: str) -> RandomLinear:
        linear = self.packed.linear(prefix)
        scales = linear.weight_scales
        if "mlp" in prefix:
            scales = scales.flip(0)
        return RandomLinear(linear.layout, linear.weights, scales, linear.perm, linear.bias)

    def tensor(self, name: str) -> Tensor:
        return self.packed.tensor(name)
