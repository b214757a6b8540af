"""`w4a4 serve` itself, in processes of its own: what it prints, what it refuses and how it ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from child_server import Command, prepare
from live_server import byte_tokenizer


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_packed import write_packed

    folder = write_packed(tmp_path_factory.mktemp("tiny"), "llama", "dual")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    prepare()
    commands: list[Command] = []

    def start_command(*arguments: str) -> Command:
        folder = tmp_path / str(len(commands))
        folder.mkdir()
        commands.append(Command(folder, ["serve", *arguments, "--device", "cpu", "--kv-cache-memory", "0.02"]))
        return commands[-1]

    yield start_command
    for command in commands:
        if command.process.is_alive():
            command.process.kill()
        command.process.join(10)


def test_two_servers_on_one_checkpoint(start: Callable[..., Command], packed: Path) -> None:
    first = start(str(packed), "--port", "0", "--json")
    second = start(str(packed), "--port", "0", "--json", "--served-model-name", "again", "--api-key", "k")
    body = {"prompt": "twice", "max_tokens": 8, "temperature": 0}
    answers = [
        httpx.post(first.url() + "/v1/completions", json=body, timeout=30),
        httpx.post(second.url() + "/v1/completions", json=body, timeout=30, headers={"authorization": "Bearer k"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    assert [answer.json()["model"] for answer in answers] == ["packed", "again"]
    assert first.url().startswith("http://127.0.0.1:")
    # The port is taken: told before the model is loaded.
    third = start(str(packed), "--port", first.url().rsplit(":", 1)[1])
    assert third.wait() == 2
    assert "Address already in use" in third.err and "--port" in third.err
    assert "Traceback" not in third.err
    assert (first.stop(), second.stop()) == (0, 0)
    assert "pages" in first.err and "tokens" in first.err


def test_settings_from_the_environment_and_a_file(
    start: Callable[..., Command], packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("max-model-len: 48\nserved-model-name: from-file\n")
    command = start(str(packed), "--port", "0", "--json", "--config", str(config), "--max-model-len", "32")
    (model,) = httpx.get(command.url() + "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("from-file", 32)
    assert command.stop() == 0


def test_explain_names_bits_and_kernel_of_every_linear(start: Callable[..., Command], packed: Path) -> None:
    command = start(str(packed), "--explain", "--json")
    assert command.wait() == 0
    assert command.out.count("self_attn") >= 2 and "kernel" in command.out
    assert "ready" not in command.err


def test_a_checkpoint_that_fails_verify_is_refused(start: Callable[..., Command], packed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(packed, broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    command = start(str(broken), "--port", "0")
    assert command.wait() == 5
    assert weights.name in command.err and "Traceback" not in command.err
    missing = start(str(tmp_path / "nowhere"), "--port", "0")
    assert missing.wait() == 3
    tiny = start(str(packed), "--port", "0", "--max-model-len", "4000000")
    assert tiny.wait() == 7
    assert "--max-model-len" in tiny.err
