"""What a quantise run will need, told before any weight is read: memory, disk, time, and the table of layers.

Counts are exact; times come from the float32 GEMM rate measured on the spot, so they are estimates of minutes, not of
seconds.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import ResourceError
from w4a4.configs.recipe import Recipe

FLOAT = 4
BF16 = 2
RESERVE = 512 * 2**20  # interpreter, libraries, tokenizer


@dataclass(frozen=True)
class Estimate:
    """Bytes, seconds and counts of one `quantize` run.

    peak_memory: host bytes where `device` is a CPU, device bytes otherwise. host_memory: the residual stream and what else
    stays on the host. disk: checkpoint, work folder and saved stream at their largest together.
    """

    checkpoint_bytes: int
    peak_memory: int
    host_memory: int
    disk: int
    seconds: float
    calibration_macs: int
    tokens: int

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def estimate(config: ModelConfig, recipe: Recipe, samples: int, seq: int, macs_per_second: float) -> Estimate:
    """The needs of quantising a model of shape `config` on `samples` windows of `seq` tokens."""
    tokens = samples * seq
    shapes = config.linear_shapes()
    layer_params = sum(rows * columns for rows, columns in shapes.values())
    table = config.vocab_size * config.hidden_size
    tables = table if config.tie_word_embeddings and recipe.method != "dual" else 2 * table
    high = recipe.high_share if recipe.method == "dual" else recipe.budget if recipe.high_weight_bits == 8 else 0.0
    weight_bits = recipe.weight_bits * (1 - high) + 8 * high + 16 * recipe.outlier_share
    checkpoint = int(config.num_layers * layer_params * weight_bits / 8) + tables * BF16

    widest = max(columns for _, columns in shapes.values())
    stream = tokens * config.hidden_size * FLOAT
    hessian = widest * widest * FLOAT * (5 if recipe.rounding == "gptq" else 1)
    largest = max(rows * columns for rows, columns in shapes.values())
    activations = seq * (2 * config.intermediate_size + 4 * config.hidden_size) * FLOAT
    scores = config.num_heads * seq * seq * FLOAT
    layer = 2 * layer_params * FLOAT + 3 * largest * FLOAT + hessian + activations + scores
    embedding = 3 * table * FLOAT
    peak = max(layer + stream, embedding + stream)

    forward = config.num_layers * tokens * (layer_params + seq * config.q_size)
    moments = (
        config.num_layers
        * tokens
        * sum(
            columns * columns
            for columns in (config.hidden_size, config.q_size, config.hidden_size, config.intermediate_size)
        )
    )
    covariance = config.num_layers * tokens * 2 * config.hidden_size**2
    feedback = config.num_layers * sum(rows * columns * columns // 2 for rows, columns in shapes.values())
    # Calibration is one forward pass; quantising runs attention and feed-forward twice and the moments once.
    macs = 3 * forward + moments + covariance + (feedback if recipe.rounding == "gptq" else 0)
    return Estimate(
        checkpoint_bytes=checkpoint,
        peak_memory=peak + RESERVE,
        host_memory=stream + embedding + RESERVE,
        disk=checkpoint + min(checkpoint, 5 * 10**9) + 2 * stream,
        seconds=macs / macs_per_second,
        calibration_macs=macs,
        tokens=tokens,
    )


def measured_macs_per_second(device: torch.device | str = "cpu") -> float:
    """The float32 GEMM rate of this machine, from products of about 0.1 s."""
    size = 1024 if torch.device(device).type == "cpu" else 8192
    a = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - start)
    return size**3 / best


def check_resources(needs: Estimate, output: Path, device: torch.device | str = "cpu") -> None:
    """Refuse a run that cannot finish. Raises ResourceError naming need, have and the flag to change."""
    available = available_memory(device)
    if needs.peak_memory > available:
        raise ResourceError(
            f"quantising needs about {_gib(needs.peak_memory)} of memory on {device}, {_gib(available)} are free",
            "lower --samples or --seq, or free memory; --no-preflight tries all the same",
        )
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needs.disk > free:
        raise ResourceError(
            f"quantising needs about {_gib(needs.disk)} of disk under {folder}, {_gib(free)} are free",
            "choose another disk with -o, or free some; --no-preflight tries all the same",
        )


def available_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes: of the GPU, or of the host within this process's cgroup."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
