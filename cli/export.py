"""`w4a4 export`: a packed checkpoint rewritten for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from w4a4.cli.console import Console, format_bytes
from w4a4.cli.options import common_options, option, pass_console
from w4a4.configs.errors import UsageError

if TYPE_CHECKING:
    from w4a4.kernels.layout import ActMode

FORMATS = ("fake-quant", "compressed-tensors")
_DTYPES = ("bfloat16", "float16", "float32")


@click.command(
    "export",
    help="Write the packed checkpoint in DIR for other tools. fake-quant: an ordinary float model of the rounded "
    "weights, for any evaluator. compressed-tensors: the integers themselves, for vLLM and transformers without w4a4; "
    "where that format cannot hold what the recipe does, the command says what and stops (exit code 4).",
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@option("--format", "form", type=click.Choice(FORMATS), required=True, help="What to write.")
@option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write. Default: DIR-<format>.")
@option("--dtype", type=click.Choice(_DTYPES), help="Of fake-quant's weights. Default: bfloat16.")
@option(
    "--act",
    type=click.Choice(["map", "a8", "a16"]),
    help="Activations that compressed-tensors' reader is asked for. Default: map, the checkpoint's.",
)
@common_options
@pass_console
def command(
    console: Console,
    folder: Path,
    form: str,
    output: Path | None,
    dtype: str | None,
    act: ActMode | None,
    as_json: bool,
) -> None:
    import torch

    from w4a4.export.checkpoint import open_checkpoint

    if form == "fake-quant" and act is not None:
        raise UsageError("--act is for --format compressed-tensors: fake-quant leaves activations alone")
    if form == "compressed-tensors" and dtype is not None:
        raise UsageError("--dtype is for --format fake-quant: compressed-tensors keeps the integers")
    checkpoint = open_checkpoint(folder)
    target = output or folder.with_name(f"{folder.resolve().name}-{form}")
    if form == "fake-quant":
        from w4a4.export.fake_quant import export_fake_quant

        path = export_fake_quant(checkpoint, target, getattr(torch, dtype or "bfloat16"))
        lost = "activations and the KV cache are not quantised in it"
    else:
        from w4a4.export.compressed_tensors import export_compressed_tensors

        path = export_compressed_tensors(checkpoint, target, act or "map")
        lost = "the KV cache is the reader's own"
    size = sum(file.stat().st_size for file in path.iterdir())
    if as_json:
        console.document("export", {"path": path, "format": form, "bytes": size, "note": lost})
    else:
        console.data(f"{path}: {format_bytes(size)}; {lost}")
