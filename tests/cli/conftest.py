from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from w4a4.cli.main import run


@dataclass(frozen=True)
class Result:
    """What a command line left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4A4_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("W4A4_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    """`invoke("verify", "DIR")` runs a command line in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Enough text for a few short windows, one token per byte for the tiny tokenizer."""
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + (index * index) % 26) + (" " if index % 7 == 0 else "") for index in range(900)))
    return path
