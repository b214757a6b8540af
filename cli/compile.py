"""`w4a4 compile`: a checkpoint's kernels, compiled ahead of time; needs no GPU, but the compiler (w4a4[gpu])."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from w4a4.cli.console import Console
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, option, pass_console
from w4a4.configs.errors import UnsupportedError

if TYPE_CHECKING:
    from w4a4.export.checkpoint import PackedCheckpoint
    from w4a4.kernels.compile_cache import Kernel
    from w4a4.kernels.kernel_set_sm90 import LinearUse
    from w4a4.kernels.layout import ActMode

ARCHITECTURES = ("sm_90a",)


@click.command(
    "compile",
    help="Compile the kernels that the packed checkpoint in DIR (default: the newest one) needs. Works without a GPU; "
    "copy the folder to a machine with one and set W4A4_KERNEL_CACHE to it.",
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@option("--arch", type=click.Choice(ARCHITECTURES), default="sm_90a", help="What to compile for.")
@option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Default: the kernel cache.")
@option("--act", type=click.Choice(["map", "a8"]), default="a8", help="As in `serve`.")
@option("--dry-run", is_flag=True, help="List the kernels and stop.")
@common_options
@pass_console
def command(
    console: Console, folder: Path | None, arch: str, out: Path | None, act: str, dry_run: bool, as_json: bool
) -> None:
    if folder is None:
        folder = newest_checkpoint()
        console.say(f"compiling for the newest checkpoint, {folder}")
    from w4a4.export.checkpoint import open_checkpoint
    from w4a4.kernels import compile_cache
    from w4a4.kernels.kernel_set_sm90 import kernels_of

    checkpoint = open_checkpoint(folder)
    kernels = kernels_of(linear_uses(checkpoint, cast("ActMode", act))) | cache_kernels(checkpoint)
    target = out or compile_cache.default_folder()
    if dry_run:
        if as_json:
            console.document("kernels", {"arch": arch, "kernels": list(kernels)})
        else:
            console.data("\n".join(kernels))
        return
    begin = time.monotonic()
    files = []
    with console.progress("kernel") as progress:
        for number, (name, kernel) in enumerate(kernels.items(), start=1):
            try:
                files.append(compile_cache.compile_to(kernel, arch, target))
            except compile_cache.CompilerMissingError as error:
                raise UnsupportedError(str(error), "pip install 'w4a4[gpu]'") from error
            progress.step(number, len(kernels), name)
    if as_json:
        console.document("compilation", {"arch": arch, "folder": target, "files": files})
    else:
        console.data(str(target))
    console.say(f"{len(files)} kernels for {arch} in {time.monotonic() - begin:.0f} s")


def linear_uses(checkpoint: PackedCheckpoint, act: ActMode) -> Iterator[LinearUse]:
    """The linears of `checkpoint` as `serve/model.py` runs them: fused where they read one input."""
    from w4a4.kernels.kernel_set_sm90 import LinearUse
    from w4a4.kernels.quantize_sm90_variant import Source

    normed: tuple[Source, ...] = ("rmsnorm", "rmsnorm_residual")
    groups: tuple[tuple[tuple[str, ...], tuple[Source, ...], str], ...] = (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), normed, "input_layernorm"),
        (("self_attn.o_proj",), ("plain",), ""),
        (("mlp.gate_proj", "mlp.up_proj"), normed, "post_attention_layernorm"),
        (("mlp.down_proj",), ("silu",), ""),
    )
    for layer in range(checkpoint.config.num_layers):
        prefix = f"model.layers.{layer}."
        for names, sources, norm in groups:
            layouts = [checkpoint.layout(prefix + name) for name in names]
            rows = sum(layout.out_features for layout in layouts)
            has_gain = bool(norm) and not bool((checkpoint.tensor(f"{prefix}{norm}.weight") == 1).all())
            is_permuted = f"{prefix}{names[0]}.input_perm" in checkpoint.entries
            yield LinearUse(replace(layouts[0], out_features=rows).at(act), sources, is_permuted, has_gain)


def cache_kernels(checkpoint: PackedCheckpoint) -> dict[str, Kernel]:
    """The kernels of `checkpoint`'s KV cache at its own width and at 16 bits (`--kv 16`), whose decode is Triton's.

    Raises:
        UnsupportedError: more query heads share a kv-head than the decode kernel takes.
    """
    import torch

    from w4a4.kernels.kv4 import KVPageLayout
    from w4a4.kernels.kv4_sm90 import kernels_of
    from w4a4.serve.model import PAGE_SIZE

    config, kv = checkpoint.config, checkpoint.quantization["kv_cache"]
    kernels: dict[str, Kernel] = {}
    for bits in sorted({int(kv["bits"]), 16}):
        sinks = int(kv["sink_tokens"]) if bits == 4 else 0
        layout = KVPageLayout(config.num_kv_heads, config.head_dim, PAGE_SIZE, bits, sinks)
        flags = config.qk_norm, bool(kv["k_mean"]), bool(kv["qk_hadamard"])
        try:
            kernels |= kernels_of(layout, config.num_heads, torch.bfloat16, *flags)
        except ValueError as error:
            raise UnsupportedError(str(error), "run with --device cpu") from error
    return kernels
