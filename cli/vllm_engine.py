"""`w4a4 serve --engine vllm`: the same options as far as vLLM has them, all others handed through, then vLLM itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from w4a4.cli.console import Console
from w4a4.configs.errors import NotFoundError, UsageError

_SAME_IN_VLLM = {
    "host": "--host",
    "port": "--port",
    "api_keys": "--api-key",
    "served_model_name": "--served-model-name",
    "chat_template": "--chat-template",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "seed": "--seed",
}
_SWITCHES = {"eager": "--enforce-eager", "prefix_caching": "--no-enable-prefix-caching"}
_OURS = {"folder", "engine", "tensor_parallel_size", "act", "kv"}


class EngineCommand(click.Command):
    """A command that knows its options, unless the engine is vLLM, whose options it lets pass."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [word for argument in args for word in argument.split("=", 1)]
        if os.environ.get("W4A4_ENGINE") == "vllm" or ("--engine", "vllm") in zip(words, words[1:], strict=False):
            ctx.ignore_unknown_options = ctx.allow_extra_args = True
        return super().parse_args(ctx, args)


def vllm_flags(context: click.Context, folder: Path) -> list[str]:
    """Flags for vLLM: those of our options that were given, by its names, then the ones that we do not know.

    Raises:
        UsageError: an option that only our own engine has.
        NotFoundError: a chat template that is not there.
    """
    flags = ["--host", str(context.params["host"]), "--port", str(context.params["port"])]
    flags += ["--served-model-name", context.params["served_model_name"] or folder.resolve().name]
    for name, value in context.params.items():
        if context.get_parameter_source(name) in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP):
            continue
        if name in _SWITCHES:
            flags += [_SWITCHES[name]] if value is (name == "eager") else []
        elif name == "generation_config":
            flags += ["--generation-config", "auto" if value == "auto" else "vllm"]
        elif name in _SAME_IN_VLLM:
            if name == "chat_template" and not value.is_file():
                raise NotFoundError(f"--chat-template: there is no file {value}")
            if name not in ("host", "port", "served_model_name"):
                flags += [_SAME_IN_VLLM[name], *map(str, value if isinstance(value, tuple) else (value,))]
        elif name not in _OURS:
            raise UsageError(
                f"--{name.replace('_', '-')} is an option of our own engine, not of vLLM", "vllm serve --help"
            )
    return flags + list(context.args)


def serve_in_vllm(console: Console, context: click.Context, folder: Path, values: Mapping[str, Any]) -> int:
    """Become `vllm serve`. Returns only where an operating system cannot replace a process.

    Raises:
        UnsupportedError: vLLM is missing or unsupported, or the checkpoint cannot be cut into so many ranks.
    """
    from w4a4.export.checkpoint import open_checkpoint
    from w4a4.serve.integrations.vllm.launch import serve_command

    checkpoint = open_checkpoint(folder)
    flags = vllm_flags(context, folder)
    kv = values["kv"]
    arguments = serve_command(checkpoint, values["tensor_parallel_size"], values["act"], int(kv) if kv else None, flags)
    console.say(f"starting: {_quoted(arguments)}")
    return execute(arguments)


def execute(arguments: Sequence[str]) -> int:
    os.execv(arguments[0], list(arguments))


def _quoted(arguments: Sequence[str]) -> str:
    import shlex

    hidden = [
        ("***" if before == "--api-key" else argument)
        for before, argument in zip(["", *arguments], arguments, strict=False)
    ]
    return shlex.join(hidden)
