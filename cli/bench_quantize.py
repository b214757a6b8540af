"""`w4a4 bench quantize MODEL`: where the time and the memory of quantising go, by stage. Nothing it writes stays."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4a4.cli.calibrate import calibration_run
from w4a4.cli.console import Console

if TYPE_CHECKING:
    import torch

    from w4a4.export.pipeline import LayerReport

DEFAULT_MODEL = "smollm2-135m"
SAMPLES = 8
COLUMNS = ["stage", "seconds", "share", "resident GiB", "device GiB"]


@dataclass(frozen=True)
class Stage:
    """One stage. resident_gib: the process's peak so far; device_gib: the GPU's peak in this stage, None on a CPU."""

    name: str
    seconds: float
    resident_gib: float
    device_gib: float | None

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "stage": self.name,
            "seconds": round(self.seconds, 3),
            "resident_gib": round(self.resident_gib, 3),
        }
        return values if self.device_gib is None else values | {"device_gib": round(self.device_gib, 3)}


@dataclass
class StageClock:
    """Collects stages one after the other."""

    device: torch.device
    stages: list[Stage] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        import torch

        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        yield
        if is_gpu:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if is_gpu else None
        self.stages.append(Stage(name, seconds, resident_gib(), peak))


def resident_gib() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def measure_quantize(
    console: Console, model: str, recipe_name: str, device: torch.device, samples: int, seq: int, offline: bool
) -> list[Stage]:
    """Calibrate and quantise `model` into a temporary folder, and say where the time went."""
    from w4a4.calibrate.source import open_source
    from w4a4.calibrate.statistics import collect
    from w4a4.configs.recipe import load_recipe
    from w4a4.export.pipeline import Callbacks, quantize
    from w4a4.export.plan import fit_recipe

    clock = StageClock(device)
    with clock.stage("open the source"):
        source = open_source(model, offline=offline)
        recipe = fit_recipe(load_recipe(recipe_name), source.config)
    with clock.stage("read and tokenise the text"):
        run, tokens = calibration_run(console, source, "wikitext2-bundled", samples, seq, 0, offline)
    console.say(f"{source.identity.name}: {samples} windows of {seq} tokens, recipe {recipe.name}, on {device}")
    with clock.stage("calibrate"):
        stats = collect(source, run, tokens, device, lambda layer, total: None)
    ends: list[float] = []
    with tempfile.TemporaryDirectory(prefix="w4a4-bench-") as scratch, console.progress("quantize layer") as progress:

        def on_layer(report: LayerReport) -> None:
            ends.append(time.perf_counter())
            progress.step(report.layer + 1, report.num_layers)

        begin = time.perf_counter()
        with clock.stage("quantise and write"):
            quantize(source, stats, recipe, Path(scratch) / "checkpoint", device, Callbacks(on_layer))
        whole = clock.stages.pop()
        first = ends[0] - begin
        layers = ends[-1] - ends[0]
        rest = whole.seconds - (ends[-1] - begin)
    memory = (whole.resident_gib, whole.device_gib)
    clock.stages += [
        Stage("quantise: plan, promotions, first layer", first, *memory),
        Stage(f"quantise: {len(ends) - 1} further layers", layers, *memory),
        Stage("embedding, head, hashes, publish", rest, *memory),
    ]
    return clock.stages


def rows(stages: list[Stage]) -> list[list[object]]:
    total = sum(stage.seconds for stage in stages)
    return [
        [
            stage.name,
            f"{stage.seconds:.2f}",
            f"{100 * stage.seconds / total:.0f} %",
            f"{stage.resident_gib:.2f}",
            "-" if stage.device_gib is None else f"{stage.device_gib:.2f}",
        ]
        for stage in stages
    ]
