from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from w4a4.calibrate.source import open_source
from w4a4.calibrate.statistics import (
    POINTS,
    SINK_TOKENS,
    CalibrationRun,
    CalibrationStats,
    collect,
    load_statistics,
    save_statistics,
    token_weights,
)
from w4a4.configs.errors import CheckpointError, NotFoundError, NumericsError, UsageError

ModelFolder = Callable[..., Path]

RUN = CalibrationRun("tiny", "0" * 64, "words", 3, 24, 0, "1" * 64)
LOUD = 7  # a token id whose feed-forward is massive in layer 1


def tokens() -> Tensor:
    ids = torch.randint(8, 300, (3, 24), generator=torch.Generator().manual_seed(2))
    ids[1, 5] = LOUD
    return ids


def change_weights(folder: Path, change: Callable[[Any], None]) -> None:
    """Load the model in `folder`, let `change` work on it, and save it again."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)


def make_loud(model: Any) -> None:
    direction = model.model.embed_tokens.weight[LOUD]
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight[0] = 60 * direction / direction.norm()
    mlp.up_proj.weight[0] = 60 * direction / direction.norm()


@pytest.fixture(params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Path:
    path = model_folder(request.param)
    change_weights(path, make_loud)
    return path


@torch.inference_mode()
def hooked_activations(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """What transformers' own modules read and write on `tokens()`: "layers.0.mlp.down_proj.in", "...k_proj.out", ..."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def remember(_module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
            if inputs and isinstance(output, Tensor):
                seen[f"{name}.in"], seen[f"{name}.out"] = inputs[0].detach(), output.detach()

        return remember

    for name, module in model.model.named_modules():
        module.register_forward_hook(hook(name))
    model(tokens())
    return seen, model


def brute_force(folder: Path) -> dict[str, Tensor]:
    """Every statistic, from transformers' activations and the definitions alone."""
    seen, model = hooked_activations(folder)
    config = model.config
    head_dim = config.head_dim
    expected: dict[str, Tensor] = {}
    covariance = torch.zeros(config.hidden_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        reads = {"attn_in": "self_attn.q_proj", "attn_out": "self_attn.o_proj", "mlp_in": "mlp.gate_proj"}
        for point, module in (reads | {"mlp_hidden": "mlp.down_proj"}).items():
            x = seen[f"{prefix}{module}.in"]
            expected[f"{prefix}{point}.absmax"] = x.abs().amax((0, 1))
            total = torch.zeros(x.shape[-1])
            for sequence in x:
                median = sequence.square().sum(1).sort().values[(len(sequence) - 1) // 2]
                for token in sequence:
                    total += min(1.0, 20 * float(median / token.square().sum())) * token.square()
            expected[f"{prefix}{point}.capped_energy"] = total / x[..., 0].numel()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            x = seen[f"{prefix}{norm}.in"]
            x = x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
            for sequence in x:
                energy = sequence.square().sum(1)
                kept = sequence[20 * energy.median() >= energy]
                covariance += kept.T @ kept / len(kept) / len(x)
        q_name, k_name = ("q_norm", "k_norm") if f"{prefix}self_attn.q_norm.out" in seen else ("q_proj", "k_proj")
        heads = [seen[f"{prefix}self_attn.{name}.out"].unflatten(-1, (-1, head_dim)) if name.endswith("proj")
                 else seen[f"{prefix}self_attn.{name}.out"] for name in (q_name, k_name, "v_proj")]  # fmt: skip
        angles = torch.arange(tokens().shape[1])[:, None] * config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, head_dim, 2) / head_dim
        )
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # pair (i, i + head_dim / 2) as a complex number
        for index in (0, 1):
            low, high = heads[index].chunk(2, -1)
            turned = torch.complex(low, high) * turn
            heads[index] = torch.cat([turned.real, turned.imag], -1)
        q, k, v = (head[:, SINK_TOKENS:].flatten(0, 1) for head in heads)
        expected[f"{prefix}query_mean_square"] = q.square().mean(0)
        expected[f"{prefix}key_mean"], expected[f"{prefix}value_mean"] = k.mean(0), v.mean(0)
        expected[f"{prefix}key_variance"] = k.var(0, correction=0)
    return expected | {"residual_covariance": covariance}


def test_statistics_equal_brute_force_on_transformers_activations(folder: Path) -> None:
    stats = collect(open_source(str(folder)), RUN, tokens())
    expected = brute_force(folder)
    assert stats.tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(stats.tensors[name], value, rtol=2e-4, atol=2e-5, msg=lambda m, name=name: name + m)
    assert torch.equal(stats.head(0, "key_mean"), stats.tensors["layers.0.key_mean"])


def test_a_massive_token_counts_less(model_folder: ModelFolder) -> None:
    """Without the cap the loud token's channel would have at least the energy of that token over all tokens."""
    folder = model_folder("llama")
    change_weights(folder, make_loud)
    stats = collect(open_source(str(folder)), RUN, tokens())
    hidden = stats.channel(1, "mlp_hidden", "absmax")
    assert hidden[0] > 50 * hidden[1:].max()
    assert stats.channel(1, "mlp_hidden", "capped_energy")[0] < hidden[0] ** 2 / tokens().numel() / 20


def test_token_weights_cap_massive_tokens() -> None:
    x = torch.ones(9, 4)
    x[3] *= 10  # 100 times the median energy
    x[5] *= 4  # 16 times
    x[6] = 0
    assert token_weights(x).tolist() == pytest.approx([1, 1, 1, 0.2, 1, 1, 1, 1, 1])


def test_statistics_do_not_depend_on_how_sequences_are_batched(folder: Path) -> None:
    """Means over three sequences are the means of the means of one each (all have as many tokens)."""
    source = open_source(str(folder))
    whole = collect(source, RUN, tokens()).tensors
    parts = [collect(source, RUN, tokens()[row : row + 1]).tensors for row in range(3)]
    for name, value in whole.items():
        if "variance" in name:
            continue  # not a mean
        stacked = torch.stack([part[name] for part in parts])
        torch.testing.assert_close(value, stacked.amax(0) if "absmax" in name else stacked.mean(0))


def test_layers_are_reported_in_order(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    collect(open_source(str(folder)), RUN, tokens(), on_layer=lambda layer, total: seen.append((layer, total)))
    assert seen == [(0, 2), (1, 2)]


def test_a_dead_channel_has_no_energy(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")

    def kill(model: Any) -> None:
        model.model.layers[0].mlp.up_proj.weight[3] = 0

    change_weights(folder, kill)
    stats = collect(open_source(str(folder)), RUN, tokens())
    for statistic in ("absmax", "capped_energy"):
        values = stats.channel(0, "mlp_hidden", statistic)
        assert values[3] == 0 and (values > 0).sum() == values.numel() - 1


@pytest.mark.parametrize(("module", "named"), [("gate_proj", "mlp_hidden"), ("down_proj", "output")])
def test_an_overflow_names_its_layer(module: str, named: str, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")

    def overflow(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        getattr(mlp, module).weight.mul_(1e38)
        mlp.up_proj.weight.mul_(1e4)

    change_weights(folder, overflow)
    with pytest.raises(NumericsError, match=f"layer 1: {named}") as caught:
        collect(open_source(str(folder)), RUN, tokens())
    assert "--data" in caught.value.hint


def test_sequences_of_sinks_alone_are_refused(model_folder: ModelFolder) -> None:
    with pytest.raises(UsageError, match="more than 4 tokens, got 4"):
        collect(open_source(str(model_folder("llama"))), RUN, tokens()[:, :4])


@pytest.fixture(scope="module")
def stats() -> CalibrationStats:
    tensors = {f"layers.0.{point}.absmax": torch.rand(8) for point in POINTS}
    return CalibrationStats(RUN, tokens().int(), tensors | {"residual_covariance": torch.rand(8, 8)})


def test_a_folder_gives_back_what_was_saved(stats: CalibrationStats, tmp_path: Path) -> None:
    save_statistics(stats, tmp_path / "statistics")
    loaded = load_statistics(tmp_path / "statistics")
    assert loaded.run == stats.run
    assert torch.equal(loaded.tokens, stats.tokens) and loaded.tokens.dtype == torch.int32
    assert loaded.tensors.keys() == stats.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], value) for name, value in stats.tensors.items())
    assert sorted(path.name for path in (tmp_path / "statistics").iterdir()) == [
        "statistics.json",
        "statistics.safetensors",
    ]


def flip_a_bit(folder: Path) -> None:
    path = folder / "statistics.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "statistics.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "statistics.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "SHA-256 differs"),
        (truncate, "SHA-256 differs"),
        (edit(schema=2), "schema 2, this version reads 1"),
        (edit(run={"model": "tiny"}), "not readable as statistics"),
        (edit(run=None), "not readable as statistics"),
        (lambda folder: (folder / "statistics.json").write_text("{"), "not readable as statistics"),
        (lambda folder: (folder / "statistics.json").write_text("[]"), "not readable as statistics"),
    ],
)
def test_damage_is_found(damage: Callable[[Path], None], message: str, stats: CalibrationStats, tmp_path: Path) -> None:
    save_statistics(stats, tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_statistics(tmp_path)


def test_a_missing_folder_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_statistics(tmp_path / "nothing")
    assert "w4a4 calibrate" in caught.value.hint
