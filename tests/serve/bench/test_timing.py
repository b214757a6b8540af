from __future__ import annotations

import pytest
import torch

from w4a4.serve.bench.timing import Timing, measure

CPU = torch.device("cpu")


def test_median_and_spread() -> None:
    timing = Timing((1.0, 3.0, 2.0))
    assert timing.median == 2.0
    assert timing.spread == pytest.approx(0.5)
    assert Timing((4.0,)).spread == 0.0
    assert timing.scaled(10).seconds == (10.0, 30.0, 20.0)
    assert (timing + Timing((1.0, 1.0, 1.0))).seconds == (2.0, 4.0, 3.0)


def test_impossible_timings_are_refused() -> None:
    with pytest.raises(ValueError, match="took time"):
        Timing(())
    with pytest.raises(ValueError, match="took time"):
        Timing((1.0, 0.0))
    with pytest.raises(ValueError, match="at least one"):
        measure(lambda: None, CPU, repetitions=0)


def test_setup_and_warmup_run_and_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    calls: list[str] = []
    monkeypatch.setattr("w4a4.serve.bench.timing.time.perf_counter", lambda: clock[0])

    def setup() -> None:
        calls.append("setup")
        clock[0] += 100.0

    def work() -> None:
        calls.append("work")
        clock[0] += 2.0

    timing = measure(work, CPU, repetitions=3, warmup=2, setup=setup)
    assert timing.seconds == (2.0, 2.0, 2.0)
    assert calls == ["setup", "work"] * 5
