from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from w4a4.calibrate.decoder import FloatModel
from w4a4.calibrate.source import Source, open_source
from w4a4.calibrate.statistics import CalibrationRun, CalibrationStats, collect
from w4a4.configs.errors import NumericsError, StoppedError, UnsupportedError, UsageError
from w4a4.configs.recipe import Recipe, load_recipe, recipe_names
from w4a4.export import layer_quantizer, pipeline
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.pipeline import Callbacks, LayerReport, quantize
from w4a4.export.plan import fit_recipe
from w4a4.export.summary import summarize_checkpoint
from w4a4.export.verify import verify_checkpoint
from w4a4.export.writer import CheckpointWriter
from w4a4.serve.model import CausalLM

ModelFolder = Callable[..., Path]

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
}
DUAL = load_recipe("dual")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the pipeline catches it, and leaving the writer only gives up its lock."""


def calibrated(source: Source) -> CalibrationStats:
    tokens = torch.randint(0, 300, (3, 32), generator=torch.Generator().manual_seed(4))
    run = CalibrationRun(source.identity.name, source.identity.sha256, "words", 3, 32, 0, "hash of the tokens")
    return collect(source, run, tokens)


@pytest.fixture(scope="module")
def source(make_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(str(make_model(tmp_path_factory.mktemp("source"), "llama", tokenizer=True, **SIZES)))


@pytest.fixture(scope="module")
def stats(source: Source) -> CalibrationStats:
    return calibrated(source)


@pytest.fixture(scope="module")
def whole(source: Source, stats: CalibrationStats, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing disturbed."""
    return bytes_of(quantize(source, stats, DUAL, tmp_path_factory.mktemp("whole") / "out"))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


ERRORS = {
    # bounds of the relative error of the logits: with weights quantised alone, and with everything quantised
    "dual": (0.02, 0.15),
    "fmpq": (0.08, 0.3),
    "fmpq-int8": (0.06, 0.3),
    "quik": (0.02, 0.2),
    "rtn": (0.4, 0.5),
    "w4a16": (0.06, 0.06),
    "w8a8": (0.02, 0.025),
}


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_gives_a_sound_checkpoint(
    name: str, source: Source, stats: CalibrationStats, tmp_path: Path
) -> None:
    recipe = load_recipe(name)
    output = quantize(source, stats, recipe, tmp_path / "out")
    assert output == tmp_path / "out" and left_over(tmp_path) == []
    assert verify_checkpoint(output) == []
    assert load_recipe(str(output / "recipe.yaml")) == fit_recipe(recipe, source.config)
    checkpoint = open_checkpoint(output)
    declared = checkpoint.quantization
    assert (declared["recipe"], declared["kv_cache"]["bits"]) == (name, recipe.kv_bits)
    assert declared["activations"] == {
        "bits": recipe.act_bits, "symmetric": recipe.act_symmetric, "default_act": "map",
    }  # fmt: skip
    assert declared["transforms"] == {"down_hadamard": 64 if name in ("dual", "fmpq-int8") else 1}
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (output / file).read_bytes() == (source.identity.path / file).read_bytes()
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == [257, 256]
    is_tied = name != "dual"  # it folds the final norm into lm_head
    assert checkpoint.config.tie_word_embeddings == is_tied
    assert ("lm_head.weight" in checkpoint.entries) == (not is_tied)
    tokens = stats.tokens[:2].long()
    expected = FloatModel(source)(tokens)

    def error(**options: Any) -> float:
        return float((CausalLM(checkpoint, **options).score(tokens) - expected).norm() / expected.norm())

    weights_alone, everything = error(act="a16", kv_bits=16), error()
    assert 0.001 < weights_alone < ERRORS[name][0]
    assert everything < ERRORS[name][1]
    assert everything > weights_alone or name == "w4a16"


@pytest.mark.parametrize("kind", ["llama-tied-biased", "mistral", "qwen2", "qwen2-sliding", "qwen3"])
def test_every_architecture_survives_the_default_recipe(kind: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    source = open_source(str(model_folder(kind, tokenizer=True, **(SIZES | {"num_hidden_layers": 2}))))
    stats = calibrated(source)
    output = quantize(source, stats, DUAL, tmp_path / "out")
    assert verify_checkpoint(output) == []
    tokens = stats.tokens.long()
    expected = FloatModel(source)(tokens)
    logits = CausalLM(open_checkpoint(output), act="a8").score(tokens)
    assert float((logits - expected).norm() / expected.norm()) < 0.2


def test_the_same_run_gives_the_same_bytes(
    source: Source, stats: CalibrationStats, whole: dict[str, bytes], tmp_path: Path
) -> None:
    assert bytes_of(quantize(source, stats, DUAL, tmp_path / "again")) == whole


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool = False) -> None:
    """Make the `call`-th call of `owner.name` (from 0) the end of the run, before or after it does its work."""
    real, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 != call:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(owner, name, counted)


KILLS: list[tuple[Any, str, int, bool, int]] = [
    (pipeline, "block_widths", 0, False, 0),
    (pipeline, "block_widths", 0, True, 0),
    (layer_quantizer, "gptq", 0, False, 0),
    (layer_quantizer, "gptq", 2, False, 0),  # the attention half of the stream is updated, nothing is kept of it
    (layer_quantizer, "gptq", 7, True, 1),
    (layer_quantizer, "gptq", 10, False, 2),
    (CheckpointWriter, "save_state", 1, True, 1),
    (CheckpointWriter, "write_layer", 0, False, 0),
    (CheckpointWriter, "write_layer", 0, True, 1),
    (CheckpointWriter, "write_layer", 2, True, 3),
    (CheckpointWriter, "write_rest", 0, False, 3),
    (CheckpointWriter, "write_rest", 0, True, 3),
    (CheckpointWriter, "assemble", 0, True, 3),
    (CheckpointWriter, "publish", 0, False, 3),
]


@pytest.mark.parametrize(("owner", "name", "call", "after", "kept"), KILLS)
def test_a_killed_run_goes_on_at_the_first_unfinished_layer_and_gives_the_same_bytes(
    owner: Any,
    name: str,
    call: int,
    after: bool,
    kept: int,
    source: Source,
    stats: CalibrationStats,
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, owner, name, call, after)
        quantize(source, stats, DUAL, output)
    assert not output.exists() and left_over(tmp_path) == [".out.w4a4-work"]
    seen: list[LayerReport] = []
    quantize(source, stats, DUAL, output, callbacks=Callbacks(on_layer=seen.append))
    assert [report.layer for report in seen] == list(range(kept, 3))
    assert bytes_of(output) == whole
    assert left_over(tmp_path) == []


def test_killed_again_and_again(
    source: Source, stats: CalibrationStats, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Killed in every layer in turn, and once more at the end."""
    for owner, name in [(CheckpointWriter, "write_layer")] * 3 + [(CheckpointWriter, "write_rest")]:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, owner, name, 0, after=True)
            quantize(source, stats, DUAL, tmp_path / "out")
    assert bytes_of(quantize(source, stats, DUAL, tmp_path / "out")) == whole


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_stop_is_heard_between_layers(
    num_done: int, source: Source, stats: CalibrationStats, whole: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[int] = []
    callbacks = Callbacks(lambda report: seen.append(report.layer), lambda: len(seen) >= num_done)
    with pytest.raises(StoppedError, match=f"stopped after {num_done} of 3 layers") as stopped:
        quantize(source, stats, DUAL, tmp_path / "out", callbacks=callbacks)
    assert stopped.value.exit_code == 75
    assert seen == list(range(num_done)) and not (tmp_path / "out").exists()
    quantize(source, stats, DUAL, tmp_path / "out", callbacks=Callbacks(lambda report: seen.append(report.layer)))
    assert seen == [0, 1, 2]
    assert bytes_of(tmp_path / "out") == whole


def test_a_stop_after_the_last_layer_finishes_the_run(
    source: Source, stats: CalibrationStats, whole: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[int] = []
    callbacks = Callbacks(lambda report: seen.append(report.layer), lambda: len(seen) == 3)
    assert bytes_of(quantize(source, stats, DUAL, tmp_path / "out", callbacks=callbacks)) == whole


def test_a_failed_quality_gate_publishes_nothing_and_loses_nothing(
    source: Source, stats: CalibrationStats, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output, seen = tmp_path / "out", []

    def refuse(folder: Path) -> dict[str, Any]:
        assert open_checkpoint(folder).config.num_layers == 3  # complete enough to be measured
        raise NumericsError("perplexity 99 exceeds the limit of 20")

    for _ in range(2):
        with pytest.raises(NumericsError) as failed:
            quantize(source, stats, DUAL, output, callbacks=Callbacks(seen.append, quality=refuse))
        assert failed.value.exit_code == 6
        assert not output.exists() and left_over(tmp_path) == [".out.w4a4-work"]
    assert len(seen) == 3  # the second attempt had nothing left to quantise
    assert bytes_of(quantize(source, stats, DUAL, output)) == whole


def test_what_the_gate_measured_is_kept(source: Source, stats: CalibrationStats, tmp_path: Path) -> None:
    measured = {
        "perplexity": 21.5,
        "source_perplexity": 20.25,
        "path": "reference-cpu, act map",
        "text": "words test",
        "tokens_scored": 1023,
        "seq": 512,
    }
    output = quantize(source, stats, DUAL, tmp_path / "out", callbacks=Callbacks(quality=lambda folder: measured))
    manifest = json.loads((output / "w4a4_manifest.json").read_text())
    assert manifest["quality"]["evaluation"] == measured
    card = (output / "README.md").read_text()
    assert "| perplexity, source | 20.250 |" in card
    assert "| perplexity, this checkpoint | 21.500 (reference-cpu, act map) |" in card
    assert "words test, 1023 tokens scored, windows of 512" in card
    assert verify_checkpoint(output) == []


def test_manifest_and_card(source: Source, stats: CalibrationStats, tmp_path: Path) -> None:
    reports: list[LayerReport] = []
    output = quantize(source, stats, DUAL, tmp_path / "out", callbacks=Callbacks(reports.append))
    manifest = json.loads((output / "w4a4_manifest.json").read_text())
    assert source.identity.name == str(source.identity.path)
    name = source.identity.path.name
    assert manifest["source"] == {
        "name": name, "kind": "folder", "revision": None, "sha256": source.identity.sha256,
    }  # fmt: skip
    assert manifest["calibration"] == {
        "model": name, "model_sha256": source.identity.sha256, "text": "words", "samples": 3,
        "seq": 32, "seed": 0, "token_sha256": "hash of the tokens",
    }  # fmt: skip
    assert manifest["quality"]["evaluation"] is None
    errors = manifest["quality"]["layer_errors"]
    assert list(errors) == list(source.config.linear_shapes())
    for report in reports:
        assert (report.num_layers, set(report.errors)) == (3, set(errors))
        for name, value in report.errors.items():
            assert 0 < value < 0.2
            assert errors[name][report.layer] == pytest.approx(value, abs=1e-6)
    for path in output.iterdir():
        assert str(source.identity.path.parent).encode() not in path.read_bytes()
    summary = summarize_checkpoint(open_checkpoint(output))
    card = (output / "README.md").read_text()
    assert f"| average weight bits (linears) | {summary.weight_bits:.3f} |" in card
    assert f"| share of MACs with 4-bit activations | {100 * summary.mac_share_4bit:.1f} % |" in card
    assert "words, 3 x 32 tokens, seed 0" in card


@pytest.mark.parametrize(
    ("typed", "public"),
    [
        ("org/model@0123abc", "org/model@0123abc"),
        ("smollm2-135m", "smollm2-135m"),
        ("/home/someone/models/tiny-1b/", "tiny-1b"),
        ("/home/someone/tiny.Q4_1.gguf", "tiny.Q4_1.gguf"),
        ("tests", "tests"),
        (".", "somewhere"),
    ],
)
def test_a_name_for_others(typed: str, public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somewhere" / "tests").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "somewhere")
    assert pipeline._without_folder(typed) == public


def test_stages_wholly_at_8_bits_are_reported_and_the_budget_holds(
    source: Source, stats: CalibrationStats, tmp_path: Path
) -> None:
    recipe = load_recipe("dual", {"budget": 0.45})
    reports: list[LayerReport] = []
    checkpoint = open_checkpoint(quantize(source, stats, recipe, tmp_path / "out", callbacks=Callbacks(reports.append)))
    promoted = {f"model.layers.{report.layer}.{name}" for report in reports for name in report.promoted}
    whole = {
        name
        for name in checkpoint.linear_names
        if [(s.act_bits, s.weight_bits) for s in checkpoint.layout(name).segments] == [(8, 8)]
    }
    assert promoted == whole != set()
    share = summarize_checkpoint(checkpoint).mac_shares
    assert 0.35 < share["8x8"] <= 0.45
    assert share["4x4"] == pytest.approx(1 - share["8x8"])


def test_tables_in_the_checkpoint_are_the_transformed_ones(
    source: Source, stats: CalibrationStats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "TABLE_ROWS", 7)  # not a divisor of the vocabulary
    checkpoint = open_checkpoint(quantize(source, stats, DUAL, tmp_path / "out"))
    from w4a4.export.balanced_blocks import BalancedBlocks

    transform = BalancedBlocks(source.config, fit_recipe(DUAL, source.config), stats)
    table, gain = source.tensor("model.embed_tokens.weight"), source.tensor("model.norm.weight")
    _, head = transform.head(gain, table)

    def close(stored: Tensor, expected: Tensor) -> None:
        assert stored.dtype == torch.bfloat16
        torch.testing.assert_close(stored.float(), expected, rtol=2**-7, atol=1e-6)

    close(checkpoint.tensor("model.embed_tokens.weight"), transform.embedding(table))
    close(checkpoint.tensor("lm_head.weight"), head)
    assert checkpoint.tensor("model.norm.weight").tolist() == [1.0] * 192


def refused(source: Source, stats: CalibrationStats, recipe: Recipe, output: Path) -> UsageError:
    with pytest.raises(UsageError) as error:
        quantize(source, stats, recipe, output)
    return error.value


def test_statistics_of_another_model_are_refused(
    source: Source, stats: CalibrationStats, model_folder: ModelFolder, tmp_path: Path
) -> None:
    other = open_source(str(model_folder("llama", **(SIZES | {"rope_theta": 5000.0}))))
    error = refused(other, stats, DUAL, tmp_path / "out")
    assert f"the statistics are of {source.identity.name}" in error.message
    assert left_over(tmp_path) == []


def test_an_output_that_cannot_be_is_refused(source: Source, stats: CalibrationStats, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    assert "exists" in refused(source, stats, DUAL, tmp_path / "out").message
    assert "is the source itself" in refused(source, stats, DUAL, source.identity.path).message


def test_another_run_does_not_continue_this_one(source: Source, stats: CalibrationStats, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        quantize(source, stats, DUAL, tmp_path / "out", callbacks=Callbacks(should_stop=lambda: True))
    error = refused(source, stats, load_recipe("dual", {"seed": 1}), tmp_path / "out")
    assert "different run" in error.message and "recipe" in error.message and "rm -r" in error.hint


def test_sizes_that_cannot_be_packed_are_refused_before_anything_is_written(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    source = open_source(str(model_folder("llama")))
    with pytest.raises(UnsupportedError, match="head_dim 16"):
        quantize(source, calibrated(source), DUAL, tmp_path / "out")
    assert left_over(tmp_path) == []
