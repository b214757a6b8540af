"""The figures of `benchmarks/engine_overhead.py`: that they are measured right, and (e2e) that they are good."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_overhead.py"


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_overhead", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_overhead"] = module
    spec.loader.exec_module(module)
    return module


def test_a_slow_host_shows_as_a_gap(overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    quick = overhead.measure_alone(overhead.ReadyRunner(0.002, 4), 4, 40)
    build = overhead.Engine.step

    def slow_step(engine: object) -> None:
        time.sleep(0.012)
        build(engine)

    monkeypatch.setattr(overhead.Engine, "step", slow_step)
    slow = overhead.measure_alone(overhead.ReadyRunner(0.002, 4), 4, 40)
    assert slow["gap_ms"] - quick["gap_ms"] > 7
    assert slow["tokens_per_second"] < quick["tokens_per_second"]


@pytest.mark.e2e
def test_64_streams_leave_a_device_idle_for_less_than_a_millisecond(tmp_path: Path) -> None:
    record = tmp_path / "overhead.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(record.read_text())["with_server"]["gap_ms"] < 1.0
