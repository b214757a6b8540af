"""A checkpoint with one thing wrong: every command that takes it says the same, in a line and with one exit code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from w4a4.cli.main import run
from w4a4.export.checkpoint import CONFIG_FILE, MANIFEST_FILE
from w4a4.export.manifest import SECTIONS, build_manifest, encode_json

Damage = Callable[[Path], None]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def sound(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nothing is wrong with; do not change it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    text = folder / "text.txt"
    text.write_text("0123456789 " * 40)
    source = make_model(folder, "llama", tokenizer=True, attention_bias=True, **SIZES)
    options = ["--recipe", "quik", "--data", str(text), "--samples", "2", "--seq", "32", "--gate-tokens", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("W4A4_STATE", str(folder / "state"))
        assert run(["quantize", str(source), "-o", str(folder / "packed"), "--no-report", *options]) == 0
    return folder / "packed"


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "packed")


def edit(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change a JSON file; hashes follow."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_bytes())
        change(content)
        write(file, json.dumps(content).encode())(folder)

    return damage


def write(file: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).write_bytes(content)
        rehash(folder)

    return damage


def rehash(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    extras = {key: manifest[key] for key in SECTIONS}
    (folder / MANIFEST_FILE).write_bytes(encode_json(build_manifest(folder, extras)))


def remove(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        rehash(folder)

    return damage


def loop(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()
    (folder / CONFIG_FILE).symlink_to(CONFIG_FILE)


def nothing_left(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def poison(name: str, value: float) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        tensors[name].view(-1)[3] = value
        save_file(tensors, folder / SHARD, {"format": "pt"})
        rehash(folder)

    return damage


def quantization(**changes: Any) -> Damage:
    return edit(CONFIG_FILE, lambda config: config["quantization_config"].update(changes))


NAN, INF = float("nan"), float("inf")
FAULTS: dict[str, tuple[Damage, int, str]] = {
    "config.json is a list": (write(CONFIG_FILE, b"[]"), 5, "got list, expected a JSON object"),
    "config.json is no JSON": (write(CONFIG_FILE, b"{"), 5, "config.json: not JSON"),
    "config.json nested without end": (write(CONFIG_FILE, b"[" * 200_000), 5, "config.json: not JSON"),
    "config.json is missing": (remove(CONFIG_FILE), 5, "config.json: missing"),
    "config.json is a link to itself": (loop, 5, "config.json: a link that leads nowhere"),
    "an empty folder": (nothing_left, 3, "config.json"),
    "no quantization_config": (edit(CONFIG_FILE, lambda c: c.update(quantization_config=None)), 4, "not a w4a4"),
    "a version in other digits": (quantization(format_version="1.٣"), 5, "expected MAJOR.MINOR"),
    "a newer version": (quantization(format_version="2.0"), 4, "checkpoint format 2.0"),
    "an unknown feature": (quantization(required_features=["zz\n\x1b[31mwarp\u202e"]), 4, r"zz \x1b[31mwarp\u202e"),
    "NaN in a norm": (poison("model.norm.weight", NAN), 6, "model.norm.weight: got NaN or infinity"),
    "infinity in an embedding": (poison("model.embed_tokens.weight", INF), 6, "model.embed_tokens.weight: got NaN"),
    "NaN in a bias": (poison("model.layers.1.self_attn.q_proj.bias", NAN), 6, "q_proj.bias: got NaN or infinity"),
    "infinity in an outlier": (poison("model.layers.0.self_attn.o_proj.weight_outlier", INF), 6, "weight_outlier: got"),
    "NaN in a scale": (poison("model.layers.0.mlp.down_proj.weight_scale", NAN), 5, "expected finite scales > 0"),
}
TEXT_FAULTS: dict[str, tuple[Damage, int, str]] = {
    "no tokenizer": (remove("tokenizer.json"), 3, "holds no tokenizer"),
    "half a tokenizer": (write("tokenizer.json", b'{"version":'), 5, "tokenizer.json: not JSON"),
    "a tokenizer that is none": (write("tokenizer.json", b"{}"), 5, "the tokenizer cannot be read"),
    "a tokenizer's settings that are a list": (write("tokenizer_config.json", b"[]"), 5, "tokenizer_config.json: got"),
}
GENERATION_FAULTS: dict[str, tuple[Damage, int, str]] = {
    "an end of text in words": (write("generation_config.json", b'{"eos_token_id": "x"}'), 5, "eos_token_id is 'x'"),
    "a wild temperature": (write("generation_config.json", b'{"temperature": -1}'), 5, "temperature is '-1'"),
}


def check(invoke: Any, arguments: list[object], code: int, said: str) -> None:
    result = invoke(*arguments)
    assert result.code == code, (arguments, result.err)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and (said in result.out if arguments[0] == "verify" and result.out else said in errors[0])
    assert "Traceback" not in result.err
    assert (result.out + result.err).replace("\n", "").isprintable()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_of_weights_and_config(invoke: Any, broken: Path, fault: str) -> None:
    damage, code, said = FAULTS[fault]
    damage(broken)
    commands: list[list[object]] = [["verify", broken], ["generate", broken, "hi"], ["serve", broken, "--port", 0]]
    commands += [["bench", broken, "--seq", 8, "--gen", 2]]
    if fault != "no quantization_config":  # once the manifest is gone as well, that is a source model
        commands += [["eval", broken, "--seq", 8, "--max-tokens", 8, "--data", "wikitext2-bundled"]]
    for arguments in commands:
        check(invoke, arguments, code, said)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", TEXT_FAULTS | GENERATION_FAULTS)
def test_of_what_lies_between_text_and_tokens(invoke: Any, broken: Path, fault: str) -> None:
    damage, code, said = (TEXT_FAULTS | GENERATION_FAULTS)[fault]
    damage(broken)
    check(invoke, ["verify", broken], 5, said)
    check(invoke, ["generate", broken, "hi"], code, said)
    check(invoke, ["serve", broken, "--port", 0], code, said)
    if fault in TEXT_FAULTS:
        check(invoke, ["eval", broken, "--seq", 8, "--max-tokens", 8, "--data", "wikitext2-bundled"], code, said)


def test_a_tokenizer_of_another_model(invoke: Any, broken: Path, model_folder: Callable[..., Path]) -> None:
    other = model_folder("llama", tokenizer=True, vocab_size=400)
    write("tokenizer.json", (other / "tokenizer.json").read_bytes())(broken)
    for arguments in (["verify", broken], ["generate", broken, "hi"], ["serve", broken, "--port", 0]):
        check(invoke, arguments, 5, "token ids up to 399, expected one for the model's vocabulary of 300")


def test_the_sound_one_is_sound(invoke: Any, sound: Path) -> None:
    assert invoke("verify", sound).out == f"{sound}: intact\n"
    assert invoke("generate", sound, "hi", "--max-tokens", 2).code == 0


def test_a_config_that_leads_out_of_the_folder(invoke: Any, broken: Path, tmp_path: Path) -> None:
    os.rename(broken / CONFIG_FILE, tmp_path / "elsewhere.json")
    (broken / CONFIG_FILE).symlink_to(tmp_path / "elsewhere.json")
    for arguments in (["verify", broken], ["generate", broken, "hi"], ["inspect", broken]):
        check(invoke, arguments, 5, "got a link to")
