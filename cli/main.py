"""The `w4a4` command: its group, its entry point, and nothing that takes time to import.

Each command lives in a file of its own and imports the rooms it needs when it runs, so `w4a4 --help` loads no PyTorch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

import click

from w4a4.cli.console import Console, PrintableFormatter
from w4a4.cli.failure import report_failure

COMMANDS = {
    "calibrate": "Run text through a model and keep what its activations look like.",
    "quantize": "Write a packed 4-bit checkpoint of a model.",
    "eval": "Score a model or checkpoint: perplexity, and distance from its source.",
    "generate": "Continue a prompt, streaming.",
    "bench": "Measure tokens per second.",
    "serve": "Answer HTTP requests in OpenAI's format.",
    "inspect": "Show what a checkpoint or model is made of.",
    "verify": "Check every byte and tensor of a checkpoint.",
    "export": "Rewrite a checkpoint for other tools.",
    "compile": "Compile kernels ahead of time.",
    "models": "List the known models, or fetch one.",
    "doctor": "Look at this machine: what will run here, and what is missing.",
}
"""Every command with its line in `w4a4 --help`; the code of "eval" is `cli/eval.py`, and so on."""


class LazyGroup(click.Group):
    """A group that imports a command's file only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"w4a4.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = get_close_matches(args[0], COMMANDS, n=2, cutoff=0.5)
            question = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{question}", ctx)
        return super().resolve_command(ctx, args)


START = """\
w4a4: 4-bit serving of large language models. To begin with a small one:

  w4a4 quantize smollm2-135m         fetch it and write ./smollm2-135m-w4a4
  w4a4 generate 'Once upon a time'   continue a text with it
  w4a4 serve --port 8000             serve it in OpenAI's format
  w4a4 --help                        every command\
"""


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version("w4a4"), prog_name="w4a4", message="%(prog)s %(version)s")
@click.pass_context
def w4a4(context: click.Context) -> None:
    """4-bit serving of large language models: weights, activations and KV cache.

    Every option can also be set in the environment as W4A4_<OPTION>, or in a YAML file given with --config. Results go
    to standard output, everything else to standard error.

    \b
    Exit codes: 0 done, 1 our bug, 2 usage, 3 not found or offline, 4 not supported, 5 corrupt checkpoint,
    6 numbers not finite or quality gate failed, 7 memory or disk, 75 stopped and can resume, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(START, err=True)
        context.exit(2)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises and never exits."""
    _quieten_libraries()
    console = Console()
    handler = logging.StreamHandler()  # to standard error
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logger = logging.getLogger("w4a4")
    logger.addHandler(handler)
    logger.propagate = False
    console.set_verbosity(0)
    try:
        result: Any = w4a4.main(
            args=None if arguments is None else list(arguments), prog_name="w4a4", obj=console, standalone_mode=False
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # the reader of our output went away, as in `w4a4 models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:  # every ending has its exit code
        return report_failure(error, console.verbosity)
    finally:
        logger.removeHandler(handler)


def main() -> NoReturn:
    """Entry point of the installed `w4a4` command."""
    sys.exit(run())


def _quieten_libraries() -> None:
    """Bars and advice of the libraries below, off unless asked for; they read these variables when imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
