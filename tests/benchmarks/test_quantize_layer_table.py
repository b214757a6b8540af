"""The table of what quantising a large model costs says what its file says."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("quantize_layer_table", BENCHMARKS / "quantize_layer_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_row_sums_the_stages_that_move_files(module: ModuleType, tmp_path: Path) -> None:
    stages = {"calibrate": 1.0, "promotions": 2.0, "read weights": 0.25, "transform": 0.5, "round": 4.0}
    stages |= {"save stream": 0.5, "pack and write": 1.0, "assemble and publish": 2.0}
    record = {"model": "m", "layers": 10, "hidden": 64, "samples": 32, "seq": 2048, "stage_seconds": stages}
    record |= {"seconds_per_layer": 11.5, "once_seconds": {"basis": 2.0, "tables": 3.0}, "minutes": 2.0}
    document = {"gpu": "G", "versions": {"torch": "2"}, "commit": "c", "records": [record | {"peak_device_gib": 7.0}]}
    (tmp_path / module.FILE).write_text(json.dumps(document))
    row = module.quantize_layer(tmp_path).splitlines()[-1]
    assert row == "| m | 10 | 1.0 | 2.0 | 4.5 | 3.8 | 11.5 | 5 | 2.0 | 7.0 |"


def test_no_file_is_an_empty_block(module: ModuleType, tmp_path: Path) -> None:
    assert module.quantize_layer(tmp_path) == ""
