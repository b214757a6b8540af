"""`w4a4 bench`: how many tokens per second a packed checkpoint makes on this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from w4a4.cli.console import Console, format_table
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, option, pass_console, runtime_options
from w4a4.configs.errors import UsageError

if TYPE_CHECKING:
    import torch

    from w4a4.serve.throughput import Speed

COLUMNS = ("test", "batch", "tokens/s", "spread", "ms/step")


@click.command(
    "bench",
    help="Measure prefill and decode speed of the packed checkpoint in DIR (default: the newest one) on random tokens.",
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@option("--seq", type=click.IntRange(min=1), default=1024, help="Tokens in each prompt.")
@option("--gen", type=click.IntRange(min=0), default=128, help="Tokens to decode behind it; 0: prefill only.")
@option("--batch", default="1", metavar="N[,N...]", help="Sequences at once.")
@option("-r", "--repeat", type=click.IntRange(min=1), default=3, help="Counted runs, after one to warm up.")
@option("--seed", type=int, default=0, help="Seed of the random tokens.")
@option("-o", "--format", "layout", type=click.Choice(["table", "md", "csv"]), default="table")
@runtime_options
@common_options
@pass_console
def command(
    console: Console,
    folder: Path | None,
    seq: int,
    gen: int,
    batch: str,
    repeat: int,
    seed: int,
    layout: str,
    act: str | None,
    kv: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    batches = _batches(batch)
    if folder is None:
        folder = newest_checkpoint()
        console.say(f"measuring the newest checkpoint, {folder}")
    from w4a4.cli.device import choose_device
    from w4a4.export.checkpoint import open_checkpoint
    from w4a4.serve.model import CausalLM
    from w4a4.serve.model_runner import choose_act
    from w4a4.serve.throughput import measure

    chosen = choose_device(device, for_kernels=True)
    mode = choose_act(act or "auto", chosen)
    model = CausalLM(open_checkpoint(folder), chosen, mode, int(kv) if kv else None)
    path = ", ".join(sorted(set(model.paths().values())))
    speeds: list[Speed] = []
    for size in batches:
        with console.progress(f"batch {size}: run") as progress:
            speeds += measure(model, seq, gen, size, repeat, seed, progress.step)
    facts: dict[str, Any] = {"checkpoint": str(folder), "path": path, "act": mode, "kv_bits": model.kv_bits}
    facts |= {"runs": repeat} | machine(chosen)
    rows = [
        (speed.test, speed.batch, round(speed.tokens_per_second, 1), f"±{speed.spread:.1%}")
        + (round(speed.milliseconds_per_step, 2),)
        for speed in speeds
    ]
    if as_json:
        tests = [
            {"test": speed.test, "batch": speed.batch, "tokens": speed.tokens, "seconds": list(speed.seconds)}
            | {"tokens_per_second": speed.tokens_per_second, "milliseconds_per_step": speed.milliseconds_per_step}
            for speed in speeds
        ]
        console.document("speed", facts | {"tests": tests})
    elif layout == "csv":
        console.data("\n".join(",".join(str(cell) for cell in row) for row in (COLUMNS, *rows)))
    elif layout == "md":
        rule = "|---" * len(COLUMNS) + "|"
        console.data("\n".join([_md(COLUMNS), rule, *(_md(row) for row in rows)]))
    else:
        console.data("\n".join(f"{name:<11} {value}" for name, value in facts.items()) + "\n")
        console.data(format_table(COLUMNS, rows))
    if chosen.type == "cpu":
        console.say("These are speeds of the reference on a processor: they say nothing about any GPU.")


def machine(device: torch.device) -> dict[str, Any]:
    """What the measurement depends on: device, driver's runtime and versions."""
    import os

    import torch

    facts: dict[str, Any] = {"torch": torch.__version__}
    if device.type == "cuda":
        return facts | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return (
        facts
        | {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
        | {"cores": os.cpu_count()}
    )


def _batches(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if not all(size > 0 for size in sizes):
        raise UsageError(f"--batch {text}: expected counts separated by commas", "--batch 1,8")
    return sizes


def _md(row: tuple[object, ...]) -> str:
    return "| " + " | ".join(str(cell) for cell in row) + " |"
