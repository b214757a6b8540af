"""`w4a4 export`: what it says, and how it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from w4a4.cli.main import run


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(__file__).parents[1] / "serve" / "tiny_packed.py"
    spec = importlib.util.spec_from_file_location("tiny_packed", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.write_packed(tmp_path_factory.mktemp("packed"), "llama", "dual")
    return folder


def test_fake_quant_beside_the_checkpoint(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(packed), "--format", "fake-quant", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    folder = packed.with_name("packed-fake-quant")
    assert document["schema"] == "w4a4.export" and document["path"] == str(folder)
    assert document["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_compressed_tensors_would_lose(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(packed), "--format", "compressed-tensors", "-o", str(tmp_path / "out")]
    assert run(arguments) == 4
    assert "weights of two precisions" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["fake-quant", "--act", "a16"], ["compressed-tensors", "--dtype", "float16"]])
def test_options_of_the_other_format(arguments: list[str], packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(packed), "--format", *arguments]) == 2
    assert "is for --format" in capsys.readouterr().err
