"""`w4a4 bench`: tokens per second of a whole model, of its kernels, of the quantiser, or of a running server."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from w4a4.cli.console import Console, format_table
from w4a4.cli.options import common_options, option, pass_console, runtime_options
from w4a4.configs.errors import NotFoundError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch

    from w4a4.serve.bench.records import Record
    from w4a4.serve.bench.run import Batch, BenchSettings
    from w4a4.serve.bench.server_load import Load
    from w4a4.serve.model import PackedModel

DEFAULT_SHAPE = "llama3-8b"
GPU_BATCHES, CPU_BATCHES = "1,8,64,max", "1"
GPU_REPETITIONS, CPU_REPETITIONS = 5, 3
GPU_GEN, CPU_GEN = 128, 32


@click.command(
    "bench",
    help="Measure a packed checkpoint, or with --random-weights the shape of an alias or config.json: prefill (pp) and "
    "decode (tg) in tokens per second, beside baselines from the same process. `w4a4 bench kernels` measures every "
    "operation of a layer instead, `w4a4 bench quantize MODEL` the stages of quantising, and --server URL a running "
    "server.",
)
@click.argument("model", metavar="[DIR|ALIAS|CONFIG|kernels|quantize]", required=False)
@click.argument("subject", metavar="[MODEL]", required=False)
@option("--seq", type=click.IntRange(min=1), default=1024, help="Tokens of prompt or context.")
@option("--gen", type=click.IntRange(min=1), help=f"Tokens generated. Default: {GPU_GEN}, on a CPU {CPU_GEN}.")
@option("--batch", metavar="N,..,max", help=f"Batch sizes. Default: {GPU_BATCHES}, on a CPU {CPU_BATCHES}.")
@option("--baseline", "baselines", default="", metavar="bf16,fp8", help="What to run beside it, in the same process.")
@option("-r", "--repetitions", type=click.IntRange(min=1), help="Of every test. Default: 5, on a CPU 3.")
@option("--random-weights", is_flag=True, help="The right shapes with random packed weights: no download.")
@option("--breakdown", is_flag=True, help="Also where a decode step's time goes, by kernel, from the profiler.")
@option(
    "-o", "--output", type=click.Choice(["table", "md", "json", "csv"]), default="table", help="Form of the result."
)
@option(
    "--plot", type=click.Path(path_type=Path, file_okay=False), help="Folder for plots (PNG, SVG, numbers as JSON)."
)
@option(
    "--tune",
    is_flag=True,
    help="With `kernels`: time the GEMM's tiles by shape and rewrite the table that chooses them.",
)
@option(
    "--layers",
    metavar="qkv,o,gate_up,down",
    default="qkv,o,gate_up,down",
    show_default=False,
    help="With --tune: only the shapes of these layers; what the table says of others stays.",
)
@option("--server", metavar="URL", help="Measure the OpenAI-compatible server at URL instead.")
@option("--num-requests", type=click.IntRange(min=1), default=64, help="With --server: requests in all.")
@option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=float("inf"),
    help="With --server: requests per second; default: all at once.",
)
@option(
    "--dataset",
    type=click.Choice(["random", "chat"]),
    default="random",
    help="With --server: every request of --seq and --gen tokens, or lengths as of conversations, cut at those.",
)
@option("--goodput", metavar="ttft:MS,tpot:MS", default="", help="With --server: limits that a good request keeps.")
@runtime_options
@common_options
@pass_console
def command(
    console: Console,
    model: str | None,
    subject: str | None,
    seq: int,
    gen: int | None,
    batch: str | None,
    baselines: str,
    repetitions: int | None,
    random_weights: bool,
    breakdown: bool,
    output: str,
    plot: Path | None,
    tune: bool,
    layers: str,
    server: str | None,
    num_requests: int,
    rate: float,
    dataset: Literal["random", "chat"],
    goodput: str,
    act: str | None,
    kv: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    output = "json" if as_json else output
    if server is not None:
        from w4a4.serve.bench.server_load import Load, parse_goodput

        limits = parse_goodput(goodput)
        load = Load(server, num_requests, seq, gen or GPU_GEN, rate, limits, model, dataset)
        _bench_server(console, load, output)
        return
    from w4a4.serve.bench.run import BenchSettings
    from w4a4.serve.device import choose_device
    from w4a4.serve.model_runner import choose_act

    if model == "quantize":
        _bench_quantize(console, subject, choose_device(device), seq, output)
        return
    if subject is not None:
        raise UsageError(f"one model at a time: got {model} and {subject}", f"w4a4 bench {model}")
    chosen = choose_device(device, for_kernels=True)
    is_gpu = chosen.type == "cuda"
    if not is_gpu:
        from w4a4.serve.bench.records import CPU_NOTE

        console.say(CPU_NOTE)
    if tune:
        _tune_kernels(console, model, chosen, repetitions, layers)
        return
    if model == "kernels":
        _bench_kernels(console, chosen, choose_act(act, chosen), repetitions, output, plot)
        return
    settings = BenchSettings(
        seq=seq,
        gen=gen or (GPU_GEN if is_gpu else CPU_GEN),
        batches=parse_batches(batch or (GPU_BATCHES if is_gpu else CPU_BATCHES)),
        baselines=tuple(name for name in baselines.split(",") if name),
        repetitions=repetitions or (GPU_REPETITIONS if is_gpu else CPU_REPETITIONS),
        act=choose_act(act, chosen),
        kv_bits=int(kv) if kv else None,
    )
    packed, name, identity = open_model(console, model, chosen, random_weights)
    _check_length(settings, packed.config.max_position_embeddings)
    _bench_model(console, packed, name, identity, chosen, settings, output, plot, breakdown)


def parse_batches(text: str) -> tuple[Batch, ...]:
    """ "1,8,max" -> (1, 8, "max"), sizes ascending. Raises UsageError."""
    sizes: list[int] = []
    for part in text.split(","):
        part = part.strip()
        if part == "max":
            continue
        if not part.isascii() or not part.isdigit() or int(part) < 1:
            raise UsageError(f"--batch {text}: {part!r} is not a batch size", "--batch 1,8,64,max")
        sizes.append(int(part))
    most: tuple[Batch, ...] = ("max",) if "max" in text.split(",") else ()
    return (*sorted(set(sizes)), *most)


def _check_length(settings: BenchSettings, limit: int) -> None:
    """Raise UsageError where a test would run beyond the model's positions."""
    from w4a4.serve.bench.run import COMBINED_GEN

    gen = max(settings.gen, COMBINED_GEN if "max" in settings.batches else 0)
    if settings.seq + gen > limit:
        raise UsageError(
            f"--seq {settings.seq} and {gen} generated tokens are more than the model's {limit} positions",
            f"--seq {limit - gen} or less" if gen < limit else f"--gen {limit // 2} --seq {limit // 2}",
        )


def open_model(
    console: Console, model: str | None, device: torch.device, random_weights: bool
) -> tuple[PackedModel, str, dict[str, Any]]:
    """(packed model, name for the records, what identifies its weights)."""
    from w4a4.cli.newest_checkpoint import newest_checkpoint
    from w4a4.cli.scored_model import packed_folder
    from w4a4.export.checkpoint import MANIFEST_FILE, open_checkpoint

    if model is None and not random_weights:
        try:
            model = str(newest_checkpoint())
            console.say(f"measuring the newest checkpoint, {model}")
        except NotFoundError:
            if device.type != "cuda":
                raise
            random_weights = True
    if random_weights:
        return _random_model(console, model or DEFAULT_SHAPE, device)
    assert model is not None
    folder = packed_folder(model, f"w4a4 bench {model} --random-weights, or w4a4 quantize {model}")
    manifest = folder / MANIFEST_FILE
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
    return open_checkpoint(folder), folder.resolve().name, {"checkpoint": folder.name, "manifest_sha256": digest}


def _random_model(console: Console, model: str, device: torch.device) -> tuple[PackedModel, str, dict[str, Any]]:
    from w4a4.configs.architecture import ModelConfig
    from w4a4.configs.json_file import read_json_object
    from w4a4.configs.shapes import known_shapes, shape_of
    from w4a4.serve.random_weights import LABEL, RandomModel

    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        config = ModelConfig.from_hf(read_json_object(file))
        name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    else:
        found = shape_of(model)
        if found is None:
            raise UsageError(f"the shape of {model!r} is not known", "one of: " + ", ".join(sorted(known_shapes())))
        config, name = found, model
    console.say(f"{name}: {config.num_parameters / 1e9:.2f} G parameters, {LABEL} in the layout of the dual recipe")
    return RandomModel(config, device), f"{name} ({LABEL})", {"weights": LABEL, "seed": 0}


def _bench_model(
    console: Console,
    packed: PackedModel,
    name: str,
    identity: dict[str, Any],
    device: torch.device,
    settings: BenchSettings,
    output: str,
    plot: Path | None,
    breakdown: bool,
) -> None:
    from w4a4.serve.bench.breakdown import Breakdown, decode_breakdown
    from w4a4.serve.bench.check import check_model
    from w4a4.serve.bench.environment import clocks, environment
    from w4a4.serve.bench.memory import memory_split
    from w4a4.serve.bench.run import Candidate, run_all
    from w4a4.serve.model import CausalLM

    facts = environment(device) | {"model": identity, "clocks_before": clocks(device)}
    check = check_model(packed, device, settings.act, settings.kv_bits)
    console.say(f"checked: {check.sentence}")
    facts["check"] = check.to_dict()
    facts["warmup"] = (
        "decode runs once, prefill three times before it is timed; on a GPU decode is one CUDA graph per step"
    )
    kernels: dict[str, dict[str, str]] = {}
    memory: dict[str, dict[str, float]] = {}
    breakdowns: list[Breakdown] = []

    def look(candidate: Candidate, model: CausalLM) -> None:
        kernels[candidate.name] = kernel_per_op(model)
        memory[candidate.name] = memory_split(model)
        if breakdown and device.type == "cuda":
            sizes = [size for size in settings.batches if size != "max"]
            breakdowns.extend(decode_breakdown(model, candidate.name, size, settings.seq) for size in sizes)

    def tell(record: Record) -> None:
        console.say(f"{record.recipe}/{record.act}  batch {record.batch}  {record.test}: {record.tok_s:,.1f} tokens/s")

    records = run_all(packed, name, device, settings, tell, look)
    facts |= {"kernels": kernels, "memory_gib": memory, "clocks_after": clocks(device)}
    if breakdowns:
        facts["breakdown"] = [part.to_dict() for part in breakdowns]
    if plot is not None:
        from w4a4.serve.bench.plots import write_plots

        for path in write_plots(plot, records, facts):
            console.say(f"wrote {path}")
    _show(console, records, facts, output)


def kernel_per_op(model: Any) -> dict[str, str]:
    """What runs each kind of operation; the path of a linear stands for every layer where all agree."""
    found: dict[str, set[str]] = {}
    for linear, path in model.paths().items():
        found.setdefault(linear.rsplit(".", 1)[1], set()).add(path)
    kernels = {name: ", ".join(sorted(paths)) for name, paths in found.items()}
    return kernels | {"attention": model.attention_path(), "lm_head": model.head_path()}


def _show(console: Console, records: list[Record], facts: dict[str, Any], output: str) -> None:
    from w4a4.serve.bench.records import as_csv, header, markdown, rows

    if output == "json":
        console.document("bench", facts | {"records": [record.to_dict() for record in records]})
        return
    for line in header_lines(facts):
        console.say(line)
    if output == "csv":
        console.data(as_csv(records))
    elif output == "md":
        console.data(markdown(records))
    else:
        console.data(format_table(header(records), rows(records)))


def header_lines(facts: dict[str, Any]) -> list[str]:
    """What a reader must know beside the table."""
    device = facts.get("gpu") or f"{facts['device']}, {facts['threads']} threads"
    listed = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"on {device}" + (f", driver {facts['driver']}" if "driver" in facts else "") + f"; {listed}"]
    lines.append("; ".join(f"{key} {value}" for key, value in facts["model"].items()))
    if facts["clocks_before"]:
        lines += [f"clocks {when}: {facts[f'clocks_{when}']}" for when in ("before", "after")]
    for name, kernels in facts["kernels"].items():
        lines.append(f"{name}: " + "; ".join(f"{op} = {path}" for op, path in kernels.items()))
    lines.append(facts["warmup"])
    return lines


def _bench_kernels(
    console: Console, device: torch.device, act: Any, repetitions: int | None, output: str, plot: Path | None
) -> None:
    from w4a4.serve.bench.environment import environment
    from w4a4.serve.bench.kernels import COLUMNS, measure_kernels, shapes_for

    records = []
    for record in measure_kernels(shapes_for(device), device, act, repetitions or 5):
        records.append(record)
        console.say(f"{record.op} {record.shape} M={record.tokens}: {record.microseconds:.1f} us")
    if plot is not None:
        from w4a4.serve.bench.plots import write_roofline
        from w4a4.serve.bench.roofline import limits_of

        name = environment(device).get("gpu", "")
        for path in write_roofline(plot, records, limits_of(name)):
            console.say(f"wrote {path}")
    if output == "json":
        facts = environment(device)
        console.document("bench-kernels", facts | {"records": [record.to_dict() for record in records]})
    else:
        console.table(COLUMNS, [record.row() for record in records])


def _tune_kernels(
    console: Console, model: str | None, device: torch.device, repetitions: int | None, layers: str
) -> None:
    import torch

    from w4a4.kernels.tuning_sm90 import TABLE
    from w4a4.serve.bench.gemm_tuning import LAYERS, merge, table_of, tune, write_lines

    if model != "kernels":
        raise UsageError("--tune is about kernels, not about a model", "w4a4 bench kernels --tune")
    chosen = layers.split(",")
    unknown = sorted(set(chosen) - set(LAYERS))
    if unknown:
        raise UsageError(f"no layer {unknown[0]!r}", f"--layers {','.join(LAYERS)}")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        raise UnsupportedError("--tune measures the GEMM of sm_90", "run it on a Hopper GPU")
    plans = []
    for plan in tune(repetitions or 3, chosen):
        plans.append(plan)
        bits = "+".join(map(str, plan["weight_bits"]))
        console.say(f"int{bits} {plan['rows']} x {plan['columns']}, M <= {plan['tokens']}: {plan['us']:.1f} us")
    if set(chosen) != set(LAYERS):
        plans = merge(json.loads(TABLE.read_text(encoding="utf-8"))["plans"], plans)
    TABLE.write_text(write_lines(table_of(plans), "plans"), encoding="utf-8")
    console.data(str(TABLE))


def _bench_quantize(console: Console, model: str | None, device: torch.device, seq: int, output: str) -> None:
    from w4a4.cli.bench_quantize import COLUMNS, DEFAULT_MODEL, SAMPLES, measure_quantize, rows
    from w4a4.serve.bench.environment import environment

    model = model or DEFAULT_MODEL
    stages = measure_quantize(console, model, "dual", device, SAMPLES, seq, offline=False)
    if output == "json":
        facts = environment(device) | {"model": model, "samples": SAMPLES, "seq": seq}
        console.document("bench-quantize", facts | {"records": [stage.to_dict() for stage in stages]})
    else:
        console.table(COLUMNS, rows(stages))


def _bench_server(console: Console, load: Load, output: str) -> None:
    from w4a4.serve.bench.server_load import run_load

    result = run_load(load)
    if output == "json":
        console.document("bench-server", result.to_dict())
    else:
        console.data(format_table(["measure", "value"], [[name, value] for name, value in result.to_dict().items()]))
