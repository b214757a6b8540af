"""What a quantise run will need, told before any weight is read: memory, disk, time, and the layouts of a layer.

Bytes are counted from shapes. Times come from the float32 GEMM rate measured on the spot, so they are estimates of
minutes, not of seconds.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from w4a4.calibrate.decoder import sequences_at_a_time
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import ResourceError
from w4a4.configs.recipe import Recipe
from w4a4.export.balanced_blocks import balanced_layouts
from w4a4.export.layer_quantizer import STAGES
from w4a4.export.plan import fit_recipe
from w4a4.export.published import published_layout
from w4a4.kernels.layout import LinearLayout

FLOAT = 4
BF16 = 2
RESERVE = 600 * 2**20  # interpreter, libraries, tokenizer
SHARD = 5 * 10**9  # bytes that stand twice while shards are put together
ROUNDING_MACS = 2500  # per weight: the element-wise work of scale search and GPTQ takes the time of so many
COLUMN_SECONDS = {"cpu": 6e-5, "cuda": 5e-6}  # per column that GPTQ visits, whatever its length
WEIGHT_SECONDS = 1.2e-8  # per weight: read three times and widened, packed, written, put into a shard, hashed
STREAM_SECONDS = 1.5e-9  # per byte of the residual stream that is saved with every layer


@dataclass(frozen=True)
class Estimate:
    """Bytes, seconds and counts of one `quantize` run.

    checkpoint_bytes: at most; the linears with the most 8-bit channels that the recipe allows.
    device_memory: on a GPU; 0 on a CPU. host_memory: everything else. gate_memory: on the device, of the packed model
    that the quality gate runs at the end. disk: checkpoint, work folder and saved stream at their largest together.
    macs: of calibration and quantisation. tokens: of calibration.
    """

    checkpoint_bytes: int
    device_memory: int
    host_memory: int
    gate_memory: int
    disk: int
    seconds: float
    macs: int
    tokens: int

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def planned_layouts(config: ModelConfig, recipe: Recipe) -> dict[str, LinearLayout]:
    """The layout of every linear of a layer by short name, before promotions and with all outliers that may be.

    Raises:
        UnsupportedError, UsageError: as `fit_recipe`.
    """
    recipe = fit_recipe(recipe, config)
    if recipe.method == "balanced_blocks":
        return balanced_layouts(config, recipe)
    return {name: published_layout(name, shape, recipe) for name, shape in config.linear_shapes().items()}


def estimate(
    config: ModelConfig,
    recipe: Recipe,
    samples: int,
    seq: int,
    macs_per_second: float,
    device: torch.device | str = "cpu",
) -> Estimate:
    """The needs of quantising a model of shape `config` on `samples` windows of `seq` tokens on `device`.

    Raises:
        UnsupportedError, UsageError: as `fit_recipe`.
    """
    layouts = planned_layouts(config, recipe)
    tokens = samples * seq
    table = config.vocab_size * config.hidden_size
    checkpoint = _checkpoint_bytes(config, recipe, layouts, table)

    stream = tokens * config.hidden_size * FLOAT
    together = min(samples, sequences_at_a_time(config, seq, device))
    layer = _layer_memory(config, recipe, layouts, together, seq)
    tables = table * FLOAT + (
        table * BF16 if config.tie_word_embeddings and not recipe.residual_basis else 2 * table * BF16
    )
    on_gpu = torch.device(device).type == "cuda"
    host = RESERVE + max(tables, stream + (table * FLOAT if on_gpu else max(table * FLOAT, layer)))

    macs = _macs(config, recipe, layouts, tokens, seq)
    return Estimate(
        checkpoint_bytes=checkpoint,
        device_memory=RESERVE + stream + layer if on_gpu else 0,
        host_memory=host,
        gate_memory=RESERVE + (checkpoint if on_gpu else _runtime_bytes(config, layouts) + table * (2 * FLOAT + BF16)),
        disk=checkpoint + min(checkpoint, SHARD) + 2 * stream,
        seconds=macs / macs_per_second
        + _columns(config, recipe, layouts) * COLUMN_SECONDS["cuda" if on_gpu else "cpu"]
        + config.num_layers * (_weights(layouts) * WEIGHT_SECONDS + stream * STREAM_SECONDS),
        macs=macs,
        tokens=tokens,
    )


def _checkpoint_bytes(config: ModelConfig, recipe: Recipe, layouts: dict[str, LinearLayout], table: int) -> int:
    """Bytes of tensors (codes, scales, orders, tables; not headers and side files)."""
    bits = sum(part.out_features * s.width * s.weight_bits for part in layouts.values() for s in part.segments)
    macs = sum(part.out_features * part.in_features for part in layouts.values())
    if recipe.method == "balanced_blocks":
        bits += int(recipe.budget * macs) * (recipe.high_weight_bits - recipe.weight_bits)
    can_split = recipe.method == "balanced_blocks" and recipe.budget > 0  # any linear into two segments
    extras = sum(
        FLOAT
        * (part.out_features * (part.num_scales + can_split) + part.in_features * (len(part.segments) > 1 or can_split))
        for part in layouts.values()
    )
    num_tables = 1 if config.tie_word_embeddings and not recipe.residual_basis else 2
    return config.num_layers * (bits // 8 + extras + 2 * FLOAT * config.hidden_size) + num_tables * table * BF16


def _runtime_bytes(config: ModelConfig, layouts: dict[str, LinearLayout]) -> int:
    """Bytes of all linears as the CPU runs them: int8 codes, and floats where activations are not quantised."""
    segments = ((part.out_features, segment) for part in layouts.values() for segment in part.segments)
    return config.num_layers * sum(rows * s.width * (FLOAT if s.act_bits == 16 else 1) for rows, s in segments)


def _layer_memory(
    config: ModelConfig, recipe: Recipe, layouts: dict[str, LinearLayout], together: int, seq: int
) -> int:
    """Bytes at the worst moment of one layer: its weights as read, transformed and rounded; GPTQ; some sequences."""
    weights = _weights(layouts)
    stages = [(sum(layouts[name].out_features for name in stage), layouts[stage[0]].in_features) for stage in STAGES]
    copies = (4, 5) if recipe.rounding == "gptq" else (2, 1)  # of a stage's weights, of its Hessian
    rounding = max(copies[0] * rows * columns + copies[1] * columns**2 for rows, columns in stages)
    activations = together * seq * (4 * config.intermediate_size + 6 * config.hidden_size + config.num_heads * seq)
    return FLOAT * (3 * weights + rounding + activations)


def _macs(config: ModelConfig, recipe: Recipe, layouts: dict[str, LinearLayout], tokens: int, seq: int) -> int:
    """Calibration is one forward pass; quantising runs attention and feed-forward twice, and the moments once."""
    weights = _weights(layouts)
    widths = [layouts[stage[0]].in_features for stage in STAGES]
    forward = tokens * (weights + seq * config.q_size)
    moments = tokens * (sum(width**2 for width in widths) + 2 * config.hidden_size**2)
    rounding = ROUNDING_MACS * weights
    if recipe.rounding == "gptq":
        rounding += sum(width**3 * 2 // 3 for width in widths)  # factor and inverse of a Hessian
        rounding += sum(part.out_features * part.in_features**2 // 2 for part in layouts.values())
    return config.num_layers * (3 * forward + moments + rounding)


def _weights(layouts: dict[str, LinearLayout]) -> int:
    """Of one layer's linears."""
    return sum(part.out_features * part.in_features for part in layouts.values())


def _columns(config: ModelConfig, recipe: Recipe, layouts: dict[str, LinearLayout]) -> int:
    stages = STAGES if recipe.rounding == "gptq" else ()
    return config.num_layers * sum(layouts[stage[0]].in_features for stage in stages)


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


def check_resources(
    needs: Estimate, output: Path, device: torch.device | str = "cpu", *, has_gate: bool = False
) -> None:
    """Refuse a run that cannot finish. Raises ResourceError naming need, have and the flag to change."""
    on_gpu = torch.device(device).type == "cuda"
    for place, need in ((device, needs.device_memory),) * on_gpu + (("cpu", needs.host_memory),):
        available = available_memory(place)
        if need > available:
            raise ResourceError(
                f"quantising needs about {_gib(need)} of memory on {place}, {_gib(available)} are free",
                "lower --samples or --seq, or free memory; --no-preflight tries all the same",
            )
    if has_gate and needs.gate_memory > (available := available_memory(device)):
        raise ResourceError(
            f"the quality gate needs about {_gib(needs.gate_memory)} of memory on {device} to run the packed model, "
            f"{_gib(available)} are free",
            "--gate-tokens 0 leaves the gate out; --no-preflight tries all the same",
        )
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free + _bytes_below(output.absolute().parent / f".{output.name}.w4a4-work")
    if needs.disk > free:
        raise ResourceError(
            f"quantising needs about {_gib(needs.disk)} of disk under {folder}, {_gib(free)} are free",
            "choose another disk with -o, or free some; --no-preflight tries all the same",
        )


def available_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes: of the GPU, or of the host within the limits of this process and of its control group."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sys.platform != "linux":
        return available
    available = 1024 * _table(Path("/proc/meminfo"))["MemAvailable:"]
    own = _table(Path("/proc/self/status"))
    for kind, counted in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            available = min(available, limit - 1024 * own[counted])
    groups = Path("/sys/fs/cgroup")
    for limit_file, used_file, cached in (
        (groups / "memory.max", groups / "memory.current", "inactive_file"),
        (groups / "memory/memory.limit_in_bytes", groups / "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if limit_file.exists() and (limit_text := limit_file.read_text().strip()) != "max":
            used = int(used_file.read_text()) - _table(limit_file.with_name("memory.stat"))[cached]
            available = min(available, int(limit_text) - used)
    return max(0, available)


def _table(path: Path) -> dict[str, int]:
    """The lines "name number ..." of one of the kernel's files."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _bytes_below(folder: Path) -> int:
    """What an interrupted run left and the next one does not need again."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
