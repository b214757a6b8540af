"""What options have in common: where a value may come from, and those that several commands share.

A value is looked for on the command line, then in the environment (`W4A4_<OPTION>`), then in the file of `--config`,
then in the recipe, then in the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from w4a4.cli.console import Console
from w4a4.configs.errors import UsageError

_NUMBERS = (click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT))
Function = TypeVar("Function", bound=Callable[..., Any])
pass_console = click.make_pass_decorator(Console, ensure=True)


class Option(click.Option):
    """An option that can also be set as `W4A4_<NAME>`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if self.envvar is None and self.name and self.expose_value:
            self.envvar = f"W4A4_{self.name.upper()}"

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """As click does it, but no number may be NaN, nor infinite unless that is the default (of a rate: at once), and
        only ASCII spells one: Python's own `int` reads the digits of every script. A file may hold other types."""
        if isinstance(self.type, _NUMBERS):
            if isinstance(value, str) and not value.isascii():
                raise click.BadParameter(f"{value!r} is not a number in ASCII digits.", ctx, self)
            if value is not None and not isinstance(value, str) and type(value) not in (int, float):
                raise click.BadParameter(f"{value!r} is not a number.", ctx, self)
        cast = super().type_cast_value(ctx, value)
        if isinstance(cast, float) and not math.isfinite(cast) and cast != self.default:
            raise click.BadParameter(f"{value} is not a finite number.", ctx, self)
        return cast


def option(*names: str, **settings: Any) -> Callable[[Function], Function]:
    """`click.option`, with the environment and with the default shown."""
    settings.setdefault("show_default", settings.get("default") is not None and not settings.get("is_flag"))
    return click.option(*names, cls=Option, **settings)


def common_options(function: Function) -> Function:
    """-v, -q, --config and --json, which every command has."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output."),
        click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            is_eager=True,
            expose_value=False,
            callback=_read_config,
            help="YAML file with values for this command's options.",
        ),
        click.option(
            "-v", "--verbose", count=True, expose_value=False, callback=_set_verbose, help="Say more; -vv: tracebacks."
        ),
        click.option(
            "-q", "--quiet", is_flag=True, expose_value=False, callback=_set_quiet, help="Say nothing but errors."
        ),
    ):
        function = decorate(function)
    return function


def source_options(function: Function) -> Function:
    """How a source model is found."""
    for decorate in (
        option("--revision", metavar="REV", help="Commit, tag or branch of a hub model."),
        option("--offline", is_flag=True, help="Use what is on this disk and never the network."),
    ):
        function = decorate(function)
    return function


def calibration_options(function: Function) -> Function:
    """Which text is run through a model to calibrate it."""
    for decorate in (
        option("--seed", type=int, default=0, help="Seed of the windows drawn from the text."),
        option("--seq", type=click.IntRange(min=2), default=2048, help="Tokens in each window."),
        option("--samples", type=click.IntRange(min=1), default=32, help="Windows of calibration text."),
        option(
            "--data",
            default="wikitext2",
            metavar="NAME|FILE",
            help="wikitext2, wikitext2-bundled, python-stdlib, or a .txt, .jsonl or .parquet file.",
        ),
    ):
        function = decorate(function)
    return function


def runtime_options(function: Function) -> Function:
    """How a packed model runs."""
    for decorate in (
        device_option,
        option("--kv", type=click.Choice(["4", "16"]), help="Bits of the KV cache; default: the checkpoint's."),
        option(
            "--act",
            type=click.Choice(["map", "a8"]),
            help="Activation bits: the precision map, or 8 everywhere. Default: map on a CPU, a8 on Hopper.",
        ),
    ):
        function = decorate(function)
    return function


def generation_config_option(function: Function) -> Function:
    return option(
        "--generation-config",
        type=click.Choice(["auto", "none"]),
        default="auto",
        help="auto: what is not said about sampling is taken from the model's generation_config.json.",
    )(function)


def device_option(function: Function) -> Function:
    return option("--device", metavar="cpu|cuda", help="Default: cuda if there is a GPU that we support, else cpu.")(
        function
    )


def _set_verbose(context: click.Context, _parameter: click.Parameter, count: int) -> None:
    if count:
        context.ensure_object(Console).set_verbosity(count)


def _set_quiet(context: click.Context, _parameter: click.Parameter, is_quiet: bool) -> None:
    if is_quiet:
        context.ensure_object(Console).set_verbosity(-1)


def _read_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Make the file's values the command's defaults: below the command line and the environment."""
    if path is None:
        return
    import yaml

    if not path.is_file():
        raise UsageError(f"--config {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold option: value lines, got {type(values).__name__}")
    names: dict[str, str] = {}
    for parameter in context.command.params:
        if parameter.name and parameter.expose_value:
            names[parameter.name] = parameter.name
            for flag in parameter.opts:
                names[flag.lstrip("-").replace("-", "_")] = parameter.name
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        wanted = str(key).replace("-", "_")
        if wanted not in names:
            near = get_close_matches(wanted, names, n=3, cutoff=0.5)
            raise UsageError(
                f"{path}: {context.command_path} has no option {key!r}",
                f"nearest: {', '.join(near)}" if near else f"options: {', '.join(sorted(names))}",
            )
        defaults[names[wanted]] = value
    context.default_map = defaults
