"""`w4a4 calibrate`: one pass of text through a model; statistics and a report come out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from w4a4.cli.console import Console, format_bytes
from w4a4.cli.options import calibration_options, common_options, device_option, option, pass_console, source_options
from w4a4.cli.report import write_calibration_report
from w4a4.configs.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from w4a4.calibrate.source import Source
    from w4a4.calibrate.statistics import CalibrationRun


@click.command(
    "calibrate",
    help="Run text through MODEL (alias, hub id, folder or .gguf file) and keep what its activations look like: a "
    "folder of statistics for `quantize`, and report.html for people.",
)
@click.argument("model")
@option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write. Default: ./<model>-statistics.")
@calibration_options
@option("--report/--no-report", default=True, help="Draw report.html and its pictures.")
@option("--dry-run", is_flag=True, help="Say what would be done, with memory and disk, and stop.")
@device_option
@source_options
@common_options
@pass_console
def command(
    console: Console,
    model: str,
    output: Path | None,
    data: str,
    samples: int,
    seq: int,
    seed: int,
    report: bool,
    dry_run: bool,
    device: str | None,
    revision: str | None,
    offline: bool,
    as_json: bool,
) -> None:
    from w4a4.calibrate.source import open_source
    from w4a4.calibrate.statistics import collect, save_statistics

    source = open_source(model, offline=offline, revision=revision)
    target = output or Path(f"{model_stem(model)}-statistics")
    check_output(target, source)
    check_seq(seq, source)
    if dry_run:
        _show_plan(console, source, target, samples, seq, as_json)
        return
    from w4a4.serve.device import choose_device

    run, tokens = calibration_run(console, source, data, samples, seq, seed, offline)
    console.say(f"calibrating {run.model} on {samples} windows of {seq} tokens: {run.text}")
    with console.progress("layer") as progress:
        stats = collect(
            source, run, tokens, choose_device(device), lambda layer, total: progress.step(layer + 1, total)
        )
    save_statistics(stats, target)
    page = write_calibration_report(source, stats, target) if report else None
    if as_json:
        console.document("calibration", {"statistics": target, "report": page, "run": asdict(run)})
    else:
        console.data(str(target))
    console.say(f"next: w4a4 quantize {model} --statistics {target}" + (f"   (report: {page})" if page else ""))


def check_output(target: Path, source: Source) -> None:
    """Raise UsageError unless `target` is free to be written: not there, or an empty folder."""
    if target.exists() and target.resolve() == source.identity.path.resolve():
        raise UsageError(f"the output {target} is the source itself", "choose another folder with -o")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"the output {target} exists", "choose another folder with -o, or remove it first")


def check_seq(seq: int, source: Source) -> None:
    """Raise UsageError for windows longer than the model's positions."""
    longest = source.config.max_position_embeddings
    if seq > longest:
        raise UsageError(f"--seq {seq} is longer than the model's {longest} positions", f"--seq {longest} or less")


def model_stem(model: str) -> str:
    """A name for folders made from what the user typed: the alias, or the last part of a path or hub id."""
    return Path(model.partition("@")[0].rstrip("/")).name.removesuffix(".gguf") or "model"


def calibration_run(
    console: Console, source: Source, data: str, samples: int, seq: int, seed: int, offline: bool
) -> tuple[CalibrationRun, Tensor]:
    """The tokens int64 [samples, seq] to calibrate on, and the record that says which they are.

    Raises UsageError for windows longer than the model's positions, or text that is too short.
    """
    from w4a4.calibrate.statistics import CalibrationRun
    from w4a4.calibrate.text import calibration_tokens, load_text, token_hash

    check_seq(seq, source)
    text = load_text(data, "train", offline=offline)
    tokens = calibration_tokens(source.tokenizer(), text, samples, seq, seed)
    described = f"{text.name} {text.split_name}, {text.origin}"
    identity = source.identity
    run = CalibrationRun(identity.name, identity.sha256, described, samples, seq, seed, token_hash(tokens))
    return run, tokens


def _show_plan(console: Console, source: Source, target: Path, samples: int, seq: int, as_json: bool) -> None:
    config = source.config
    layer = sum(rows * columns for rows, columns in config.linear_shapes().values())
    embedding = config.vocab_size * config.hidden_size
    activations = samples * seq * config.hidden_size
    attention = seq * seq * config.num_heads + 6 * seq * max(config.intermediate_size, config.hidden_size)
    memory = 4 * (max(layer, embedding) + activations + attention)
    channels = 3 * config.hidden_size + config.intermediate_size
    disk = 4 * (config.num_layers * 3 * channels + config.hidden_size**2 + samples * seq)
    work = 2 * samples * seq * config.num_layers * layer
    plan = {"model": str(source.identity.path), "output": str(target), "layers": config.num_layers}
    plan |= {"tokens": samples * seq, "memory_bytes": memory, "disk_bytes": disk, "multiply_adds": work // 2}
    if as_json:
        console.document("calibration-plan", plan)
    else:
        console.data(f"model       {plan['model']}, {config.num_layers} layers of {layer / 1e6:.1f} M weights")
        console.data(f"tokens      {samples} x {seq} = {samples * seq:,}, {work / 1e12:.1f} TFLOP")
        console.data(f"memory      about {format_bytes(memory)}")
        console.data(f"disk        about {format_bytes(disk)} in {target}")
