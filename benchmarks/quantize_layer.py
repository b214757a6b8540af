"""What quantising a large model costs: its decoder layers with random weights, timed by stage, times their number.

    python benchmarks/quantize_layer.py llama3-8b llama3-70b -o benchmarks/results/quantize-layer-h200.json

Two layers of the model's shape are written as bf16 safetensors, calibrated and quantised by the `dual` recipe as
`w4a4 quantize` does it, files and all. The second one is what a layer costs; what a model pays once is measured apart
and scaled to its vocabulary. Writes one record per model (schema: README.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from w4a4.calibrate.safetensors_source import SafetensorsSource
from w4a4.calibrate.statistics import CalibrationRun, collect
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import load_recipe
from w4a4.configs.shapes import known_shapes
from w4a4.export import pipeline
from w4a4.export.balanced_blocks import BalancedBlocks
from w4a4.export.estimate import estimate, measured_macs_per_second
from w4a4.export.writer import CheckpointWriter

LAYERS = 2
VOCABULARY = 4096
TIMED: tuple[tuple[Any, str, str], ...] = (
    (pipeline, "layer_weights", "read weights"),
    (BalancedBlocks, "layer", "transform"),
    (pipeline, "quantize_layer", "round"),
    (CheckpointWriter, "save_state", "save stream"),
    (CheckpointWriter, "write_layer", "pack and write"),
    (pipeline, "block_widths", "promotions"),
    (BalancedBlocks, "__init__", "basis"),
    (pipeline._Run, "rest", "tables"),
    (CheckpointWriter, "assemble", "assemble"),
    (CheckpointWriter, "publish", "publish"),
)


def write_model(folder: Path, shape: dict[str, Any], device: str) -> None:
    """A model of `shape` with random weights of unit gain, as a folder of bf16 safetensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    generator = torch.Generator(device).manual_seed(0)
    index = {}
    parts: dict[str, list[str]] = defaultdict(list)
    shapes = ModelConfig.from_hf(shape).tensor_shapes()
    for name in shapes:
        parts[".".join(name.split(".")[:3])].append(name)
    for number, names in enumerate(parts.values()):
        tensors = {}
        for name in names:
            size = shapes[name]
            if "norm" in name:
                tensors[name] = torch.ones(size, dtype=torch.bfloat16)
            else:
                random = torch.randn(size, generator=generator, device=device)
                tensors[name] = (random * size[-1] ** -0.5).bfloat16().cpu()
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@contextmanager
def timed(device: str) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of what `TIMED` names, in order."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def clocked(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            begin = now(device)
            result = function(*arguments, **named)
            seconds[stage].append(now(device) - begin)
            return result

        return call

    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in TIMED]
    for owner, name, stage in TIMED:
        setattr(owner, name, clocked(getattr(owner, name), stage))
    try:
        yield seconds
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(alias: str, samples: int, seq: int, device: str, scratch: Path, shrink: int = 1) -> dict[str, Any]:
    """One model's record. `shrink` divides its widths, to try the script."""
    whole = known_shapes()[alias]
    shape = whole | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        shape[key] //= shrink
    source_folder, output = scratch / "source", scratch / "packed"
    write_model(source_folder, shape, device)
    source = SafetensorsSource(source_folder, name=alias)
    tokens = torch.randint(0, VOCABULARY, (samples, seq), generator=torch.Generator().manual_seed(0))
    run = CalibrationRun(alias, source.identity.sha256, "random tokens", samples, seq, 0, "")
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    ends = [now(device)]
    stats = collect(source, run, tokens, device, lambda layer, total: ends.append(now(device)))
    calibrate = ends[-1] - ends[-2]
    layers: list[float] = []
    recipe = load_recipe("dual")
    with timed(device) as seconds:
        pipeline.quantize(
            source, stats, recipe, output, device, pipeline.Callbacks(lambda report: layers.append(now(device)))
        )
    config, full = source.config, ModelConfig.from_hf(whole)
    stages = {
        "calibrate": calibrate,
        "promotions": seconds["promotions"][0] / LAYERS,
        **{
            stage: seconds[stage][-1]
            for stage in ("read weights", "transform", "round", "save stream", "pack and write")
        },
        "assemble and publish": (seconds["assemble"][0] + seconds["publish"][0]) / LAYERS,
    }
    per_layer = calibrate + stages["promotions"] + layers[-1] - layers[-2] + stages["assemble and publish"]
    once = {"basis": seconds["basis"][0], "tables": seconds["tables"][0] * full.vocab_size / VOCABULARY}
    total = per_layer * full.num_layers + sum(once.values())
    needs = estimate(full, recipe, samples, seq, measured_macs_per_second(device), device)
    return {
        "model": alias,
        "layers": full.num_layers,
        "hidden": config.hidden_size,
        "samples": samples,
        "seq": seq,
        "stage_seconds": {name: round(value, 3) for name, value in stages.items()},
        "seconds_per_layer": round(per_layer, 3),
        "once_seconds": {name: round(value, 2) for name, value in once.items()},
        "minutes": round(total / 60, 2),
        "peak_device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device != "cpu" else None,
        "estimated_minutes": round(needs.seconds / 60, 2),
        "estimated_device_gib": round(needs.device_memory / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="ALIAS")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide widths by this, to try the script")
    parser.add_argument("--commit", default="", help="of this repository, where git is not at hand")
    arguments = parser.parse_args()
    records = []
    if arguments.device != "cpu":  # kernels compiled and libraries loaded before anything is timed
        with tempfile.TemporaryDirectory() as scratch:
            measure("smollm2-135m", 2, 256, arguments.device, Path(scratch))
    for alias in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(alias, arguments.samples, arguments.seq, arguments.device, Path(scratch), arguments.shrink)
        records.append(found)
        print(json.dumps(found), flush=True)
        if arguments.output:
            document = header(arguments.device, arguments.commit) | {"records": records}
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def header(device: str, commit: str) -> dict[str, Any]:
    folder = str(Path(__file__).parent)
    if not commit:
        commit = subprocess.run(
            ["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cpu":
        return {"gpu": None, "versions": versions, "commit": commit}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "versions": versions, "commit": commit}


if __name__ == "__main__":
    main()
