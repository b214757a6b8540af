"""`w4a4 inspect`: what a packed checkpoint, or a model that could become one, is made of."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from w4a4.cli.console import Console, format_bytes
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, option, pass_console, source_options

if TYPE_CHECKING:
    from w4a4.calibrate.source import Source
    from w4a4.configs.architecture import ModelConfig
    from w4a4.export.checkpoint import PackedCheckpoint


@click.command(
    "inspect",
    help="Show what the packed checkpoint in DIR is made of; a source MODEL is shown by its shape. Reads no weights.",
)
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@option("--layers", is_flag=True, help="One line per linear layer.")
@source_options
@common_options
@pass_console
def command(
    console: Console, model: str | None, layers: bool, revision: str | None, offline: bool, as_json: bool
) -> None:
    if model is None:
        model = str(newest_checkpoint())
        console.say(f"the newest checkpoint, {model}")
    from w4a4.export.checkpoint import is_packed, open_checkpoint

    if is_packed(Path(model)):
        _show_checkpoint(console, open_checkpoint(Path(model)), layers, as_json)
    else:
        from w4a4.calibrate.source import open_source

        _show_source(console, open_source(model, offline=offline, revision=revision), layers, as_json)


def _show_checkpoint(console: Console, checkpoint: PackedCheckpoint, layers: bool, as_json: bool) -> None:
    from w4a4.export.summary import summarize_checkpoint

    summary = summarize_checkpoint(checkpoint)
    if as_json:
        console.document(
            "checkpoint",
            {
                "path": checkpoint.path,
                "config": asdict(checkpoint.config),
                "quantization_config": checkpoint.quantization,
                **summary.to_json(),
            },
        )
        return
    quantization = checkpoint.quantization
    producer = quantization["producer"]
    facts: list[tuple[str, Any]] = [
        ("checkpoint", checkpoint.path),
        ("format", f"{quantization['quant_method']} {quantization['format_version']}, by {_producer(producer)}"),
        ("recipe", quantization["recipe"]),
        *_shape_facts(checkpoint.config),
        ("weights", f"{summary.weight_bits:.2f} bits ({summary.stored_bits:.2f} with scales and maps)"),
        ("activations", f"{summary.act_bits:.2f} bits with the precision map"),
        ("KV cache", f"{summary.kv_bits} bits"),
        ("multiply-adds", ", ".join(f"{name} {share:.1%}" for name, share in summary.mac_shares.items())),
        ("packed linears", format_bytes(summary.packed_bytes)),
        ("unquantised rest", format_bytes(summary.unquantized_bytes)),
    ]
    console.data("\n".join(f"{name:<17} {value}" for name, value in facts))
    if layers:
        console.data("")
        console.table(
            ("linear", "N", "K", "segments (width: act x weight bits)", "stored"),
            [
                (
                    linear.name,
                    linear.out_features,
                    linear.in_features,
                    ", ".join(f"{s.width}: {s.act_bits}x{s.weight_bits}" for s in linear.segments),
                    format_bytes(linear.stored_bytes),
                )
                for linear in summary.linears
            ],
        )


def _show_source(console: Console, source: Source, layers: bool, as_json: bool) -> None:
    shapes = source.config.linear_shapes()
    if as_json:
        console.document(
            "model",
            {
                "identity": asdict(source.identity),
                "config": asdict(source.config),
                "num_parameters": source.config.num_parameters,
                "linears": {name: list(shape) for name, shape in shapes.items()},
            },
        )
        return
    identity = source.identity
    facts: list[tuple[str, Any]] = [
        ("model", identity.name),
        ("files", f"{identity.path} ({identity.kind}{', commit ' + identity.revision if identity.revision else ''})"),
        *_shape_facts(source.config),
    ]
    console.data("\n".join(f"{name:<17} {value}" for name, value in facts))
    if layers:
        console.data("")
        console.table(("linear of each layer", "N", "K"), [(name, *shape) for name, shape in shapes.items()])


def _shape_facts(config: ModelConfig) -> list[tuple[str, Any]]:
    windows = {window for window in config.sliding_windows if window is not None}
    return [
        ("architecture", f"{config.architecture}, {config.num_layers} layers, {config.num_parameters / 1e6:,.1f} M"),
        ("hidden", f"{config.hidden_size}, FFN {config.intermediate_size}, vocabulary {config.vocab_size}"),
        ("attention", f"{config.num_heads} heads, {config.num_kv_heads} key/value heads, head_dim {config.head_dim}"),
        ("positions", f"{config.max_position_embeddings}" + (f", window {sorted(windows)}" if windows else "")),
    ]


def _producer(producer: Any) -> str:
    return f"{producer.get('name')} {producer.get('version')}" if isinstance(producer, dict) else str(producer)
