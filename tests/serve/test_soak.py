"""The soak test of `benchmarks/soak.py`, short; the long one is `make test-e2e`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("seconds", "clients", "is_asynchronous"),
    [(6, 16, False), (6, 16, True), pytest.param(1800, 16, True, marks=pytest.mark.e2e)],
)
def test_nothing_is_lost_wrong_or_kept(
    soak_script: ModuleType, seconds: float, clients: int, is_asynchronous: bool
) -> None:
    tally = soak_script.soak(seconds, clients, step_seconds=0.002, is_asynchronous=is_asynchronous)
    assert tally.wrong == []
    assert tally.lost == []
    assert tally.pages_in_use_at_the_end == 0
    assert tally.preemptions > 0
    assert tally.prefix_hits > 0
    assert tally.left > tally.sent / 10
    assert tally.finished > tally.sent / 3
    assert tally.memory_growth < 8
