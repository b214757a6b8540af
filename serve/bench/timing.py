"""Time of a piece of work: repeated, warmed up, by the device's own clock. What every benchmark measures with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition of the same work, in order."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ValueError(f"a timing needs repetitions that took time, got {self.seconds}")

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Standard deviation over the mean: 0 with one repetition."""
        if len(self.seconds) == 1:
            return 0.0
        return statistics.stdev(self.seconds) / statistics.fmean(self.seconds)

    def scaled(self, factor: float) -> Timing:
        """The timing of work that takes `factor` times as long."""
        return Timing(tuple(seconds * factor for seconds in self.seconds))

    def __add__(self, other: Timing) -> Timing:
        """One piece of work after the other, repetition by repetition."""
        return Timing(tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)))


def measure(
    work: Callable[[], object],
    device: torch.device,
    repetitions: int = 5,
    warmup: int = 1,
    setup: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `work` `repetitions` times after `warmup` runs that are not counted.

    On a GPU between two CUDA events on the current stream, host time included where the host is slower than the device;
    on a CPU by the monotonic clock. `setup` runs before each repetition and is not timed.
    """
    if repetitions < 1:
        raise ValueError(f"at least one repetition is needed, got {repetitions}")
    for _ in range(warmup):
        setup()
        work()
    seconds = []
    for _ in range(repetitions):
        setup()
        seconds.append(_cuda_seconds(work) if device.type == "cuda" else _host_seconds(work))
    return Timing(tuple(seconds))


def _host_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cuda_seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
