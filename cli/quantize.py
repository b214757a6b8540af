"""`w4a4 quantize`: a model in, a packed 4-bit checkpoint out."""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from w4a4.cli.calibrate import calibration_run, check_output, check_seq, model_stem
from w4a4.cli.console import Console, format_bytes
from w4a4.cli.failure import memory_shortage
from w4a4.cli.newest_checkpoint import remember_checkpoint
from w4a4.cli.options import calibration_options, common_options, device_option, option, pass_console, source_options
from w4a4.cli.report import write_quantization_report
from w4a4.cli.stop_signals import StopSignals, resumable
from w4a4.configs.errors import ResourceError, StoppedError, UsageError

if TYPE_CHECKING:
    import torch

    from w4a4.calibrate.source import Source
    from w4a4.calibrate.statistics import CalibrationStats
    from w4a4.configs.recipe import Recipe
    from w4a4.export.pipeline import LayerReport


@click.command(
    "quantize",
    help="Write a packed 4-bit checkpoint of MODEL (alias, hub id, folder or .gguf file). A run that was stopped "
    "or killed goes on when the same command is given again.",
)
@click.argument("model")
@option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write. Default: ./<model>-w4a4.")
@option("--recipe", default="dual", metavar="NAME|FILE", help="How: a recipe that ships, or a YAML file.")
@option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key of the recipe; may be repeated.")
@option("--kv", type=click.Choice(["4", "16"]), help="Bits of the KV cache; default: the recipe's.")
@option(
    "--tp-max",
    type=click.Choice(["1", "2", "4", "8"]),
    help="Ranks of tensor parallelism that may have scales of their own. Default: the most that cost no accuracy.",
)
@option(
    "--statistics",
    "--stats",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that `calibrate` wrote. Default: calibrate on the way.",
)
@calibration_options
@option("--gate-tokens", type=click.IntRange(min=0), default=2048, help="Text scored at the end; 0: no quality gate.")
@option("--fail-if-ppl-above", type=float, metavar="X", help="Publish nothing (exit code 6) if it scores worse than X.")
@option("--report/--no-report", default=True, help="Draw report.html: in the statistics' folder, or ./<output>-report.")
@option("--preflight/--no-preflight", default=True, help="Check memory and disk before starting.")
@option("--dry-run", is_flag=True, help="Show the layers, and the memory, disk and time it needs, and stop.")
@device_option
@source_options
@common_options
@pass_console
@resumable
def command(
    console: Console,
    model: str,
    output: Path | None,
    recipe: str,
    overrides: tuple[str, ...],
    kv: str | None,
    tp_max: str | None,
    statistics: Path | None,
    data: str,
    samples: int,
    seq: int,
    seed: int,
    gate_tokens: int,
    fail_if_ppl_above: float | None,
    report: bool,
    preflight: bool,
    dry_run: bool,
    device: str | None,
    revision: str | None,
    offline: bool,
    as_json: bool,
) -> None:
    from w4a4.calibrate.shape_source import open_shape
    from w4a4.calibrate.source import open_source
    from w4a4.calibrate.statistics import load_statistics
    from w4a4.configs.recipe import load_recipe
    from w4a4.export.plan import fit_recipe
    from w4a4.export.tensor_parallel import explain_tp_max
    from w4a4.serve.device import choose_device

    if gate_tokens == 1:
        raise UsageError("--gate-tokens 1: a token is scored by those before it, so there must be two", "or 0: no gate")
    if fail_if_ppl_above is not None and not gate_tokens:
        raise UsageError("--fail-if-ppl-above needs text to score", "leave out --gate-tokens 0")
    asked = load_recipe(recipe, recipe_overrides(overrides, kv) | ({"tp_max": int(tp_max)} if tp_max else {}))
    source = (open_shape if dry_run else open_source)(model, offline=offline, revision=revision)
    chosen = fit_recipe(asked, source.config)
    console.say(explain_tp_max(source.config, asked, chosen))
    target = output or Path(f"{model_stem(model)}-w4a4")
    if not dry_run:
        check_output(target, source)
    place = choose_device(device)
    stats = load_statistics(statistics) if statistics is not None else None
    if stats is not None:
        samples, seq = stats.run.samples, stats.run.seq
    check_seq(seq, source)
    if dry_run or preflight:
        from w4a4.export.estimate import check_resources, estimate, measured_macs_per_second

        needs = estimate(source.config, chosen, samples, seq, measured_macs_per_second(place), place)
        if dry_run:
            _show_plan(console, source, chosen, target, place, needs.to_json(), as_json)
            return
        check_resources(needs, target, place, has_gate=gate_tokens > 0)
        console.say(
            f"{source.identity.name}: {source.config.num_layers} layers, recipe {chosen.name}, about "
            f"{format_bytes(max(needs.device_memory, needs.host_memory))} of memory and {needs.seconds / 60:.0f} min "
            f"on {place}"
        )
    begin = time.monotonic()
    with StopSignals() as signals:
        if stats is None:
            stats = _calibrate(console, source, target, data, samples, seq, seed, offline, place, signals)
        path, quality = _quantize(
            console, source, stats, chosen, target, place, signals, gate_tokens, fail_if_ppl_above, offline
        )
    shutil.rmtree(_own_statistics(target), ignore_errors=True)
    remember_checkpoint(path)
    page = (
        write_quantization_report(source, stats, chosen, path, _report_folder(statistics, target)) if report else None
    )
    seconds = time.monotonic() - begin
    if as_json:
        facts = {
            "path": path,
            "recipe": asdict(chosen),
            "seconds": round(seconds, 1),
            "quality": quality,
            "report": page,
        }
        console.document("quantization", facts)
    else:
        console.data(str(path))
    _say_quality(console, quality)
    if page is not None:
        console.say(f"report: {page}")
    console.say(f"done in {seconds:.0f} s. next: w4a4 generate {shlex.quote(str(path))} 'The capital of France is'")


def recipe_overrides(pairs: tuple[str, ...], kv: str | None) -> dict[str, Any]:
    """KEY=VALUE pairs as a mapping, values read as YAML; `--kv` is `kv_bits`. Raises UsageError where that fails."""
    import yaml

    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {pair}: expected KEY=VALUE", "for example --set budget=0.1")
        try:
            overrides[key.strip().replace("-", "_")] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"--set {pair}: the value is no YAML: {str(error).splitlines()[0]}") from error
    return overrides | ({"kv_bits": int(kv)} if kv else {})


def _own_statistics(target: Path) -> Path:
    """Where statistics made on the way are kept until the checkpoint is there, so that a resumed run finds them."""
    return target.absolute().parent / f".{target.name}.w4a4-statistics"


def _report_folder(statistics: Path | None, target: Path) -> Path:
    return statistics if statistics is not None else target.with_name(f"{target.name}-report")


def _calibrate(
    console: Console,
    source: Source,
    target: Path,
    data: str,
    samples: int,
    seq: int,
    seed: int,
    offline: bool,
    device: torch.device,
    signals: StopSignals,
) -> CalibrationStats:
    """Statistics of this very run: those an earlier attempt left, or new ones."""
    from w4a4.calibrate.statistics import collect, load_statistics, save_statistics
    from w4a4.configs.errors import CheckpointError, NotFoundError

    run, tokens = calibration_run(console, source, data, samples, seq, seed, offline)
    folder = _own_statistics(target)
    try:
        stats = load_statistics(folder)
        if stats.run == run:
            console.say("using the statistics of the run before")
            return stats
    except (NotFoundError, CheckpointError):
        pass  # none, or half written: made anew
    console.say(f"calibrating on {samples} windows of {seq} tokens: {run.text}")
    with console.progress("calibrate layer") as progress:

        def on_layer(layer: int, total: int) -> None:
            progress.step(layer + 1, total)
            if signals.is_requested:
                raise StoppedError(f"stopped while calibrating, at layer {layer + 1} of {total}")

        stats = collect(source, run, tokens, device, on_layer)
    save_statistics(stats, folder)
    return stats


def _quantize(
    console: Console,
    source: Source,
    stats: CalibrationStats,
    recipe: Recipe,
    target: Path,
    device: torch.device,
    signals: StopSignals,
    gate_tokens: int,
    fail_above: float | None,
    offline: bool,
) -> tuple[Path, dict[str, Any] | None]:
    from w4a4.cli.quality_gate import QualityGate
    from w4a4.export.pipeline import Callbacks, quantize

    measured: dict[str, Any] = {}
    gate = QualityGate(source, "wikitext2", gate_tokens, device, fail_above, offline)

    def measure(folder: Path) -> dict[str, Any]:
        console.say(f"quality gate: scoring {gate_tokens} tokens with the checkpoint and with its source")
        try:
            measured.update(gate.measure(folder))
        except (MemoryError, RuntimeError) as error:
            if not (shortage := memory_shortage(error)):
                raise
            hint = "the same command with --gate-tokens 0 publishes what is done, not scored"
            raise ResourceError(f"out of memory in the quality gate: {shortage}", hint) from error
        return measured

    with console.progress("quantize layer") as progress:

        def on_layer(report: LayerReport) -> None:
            progress.step(report.layer + 1, report.num_layers, describe_layer(report))

        callbacks = Callbacks(on_layer, lambda: signals.is_requested, measure if gate_tokens else None)
        path = quantize(source, stats, recipe, target, device, callbacks)
    return path, measured or None


def describe_layer(report: LayerReport) -> str:
    """What one finished layer found, in a phrase: its errors, and which linears were promoted to 8 bits."""
    worst = max(report.errors, key=lambda name: report.errors[name])
    mean = sum(report.errors.values()) / len(report.errors)
    promoted = f"; 8 bits: {', '.join(name.split('.')[-1] for name in report.promoted)}" if report.promoted else ""
    return f"error {mean:.4f}, worst {worst.split('.')[-1]} {report.errors[worst]:.4f}{promoted}"


def _show_plan(
    console: Console,
    source: Source,
    recipe: Recipe,
    target: Path,
    device: torch.device,
    needs: dict[str, float],
    as_json: bool,
) -> None:
    from w4a4.export.estimate import planned_layouts

    identity, config = source.identity, source.config
    linears: list[dict[str, Any]] = [
        {
            "name": name,
            "N": layout.out_features,
            "K": layout.in_features,
            "segments": [{"act_bits": s.act_bits, "weight_bits": s.weight_bits, "K": s.width} for s in layout.segments],
        }
        for name, layout in planned_layouts(config, recipe).items()
    ]
    if as_json:
        console.document(
            "quantization-plan",
            {"source": asdict(identity), "config": asdict(config), "recipe": asdict(recipe), "output": target}
            | {"device": str(device), "linears_per_layer": linears, "needs": needs},
        )
        return
    console.data(f"model    {identity.name}: {identity.path} ({identity.kind})")
    console.data(f"         {config.architecture}, {config.num_layers} layers, {config.num_parameters / 1e6:,.1f} M")
    console.data(f"recipe   {recipe.name}: {recipe.summary}")
    console.data(f"output   {target}\n")
    rows = [
        (
            entry["name"],
            entry["N"],
            entry["K"],
            ", ".join(f"{s['K']} at {s['act_bits']} x {s['weight_bits']}" for s in entry["segments"]),
        )
        for entry in linears
    ]
    console.table(
        (f"linear, each of {config.num_layers} layers", "N", "K", "channels at activation x weight bits"), rows
    )
    if recipe.method == "balanced_blocks":
        console.data(f"of these, the blocks that need it most run at 8 x 8 bits, up to {recipe.budget:.0%} of the MACs")
    console.data(f"\ntokens       {needs['tokens']:,}")
    console.data(f"checkpoint   about {format_bytes(needs['checkpoint_bytes'])}")
    console.data(f"disk         about {format_bytes(needs['disk'])} while it runs")
    on_device = f" on {device}, {format_bytes(needs['device_memory'])}" if needs["device_memory"] else ""
    console.data(f"memory       about {format_bytes(needs['host_memory'])}{on_device}")
    console.data(
        f"time         about {max(1, round(needs['seconds'] / 60))} min on {device}, by the speed measured now"
    )


def _say_quality(console: Console, quality: dict[str, Any] | None) -> None:
    if not quality:
        return
    console.say(
        f"perplexity {quality['perplexity']:.3f}, source {quality['source_perplexity']:.3f} "
        f"({quality['text']}, {quality['tokens_scored']:,} tokens scored, {quality['path']})"
    )
    if "sample" in quality:
        sample = quality["sample"]
        console.say(f"source: {sample['source']!r}\npacked: {sample['packed']!r}")
