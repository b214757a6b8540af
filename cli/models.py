"""`w4a4 models`: the known models, and fetching one ahead of time."""

from __future__ import annotations

import click

from w4a4.cli.console import Console
from w4a4.cli.options import common_options, pass_console, source_options


@click.group("models", invoke_without_command=True, help="List the known models, or fetch one.")
@common_options
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    if context.invoked_subcommand is not None:
        return
    from w4a4.configs.aliases import HubModel, known_models

    console = context.ensure_object(Console)
    models = known_models().values()
    if as_json:
        console.document(
            "models",
            {
                "models": [
                    {"alias": model.alias, "title": model.title, "kind": "hub", "repo": model.repo}
                    | {"revision": model.revision, "gated": model.gated}
                    if isinstance(model, HubModel)
                    else {"alias": model.alias, "title": model.title, "kind": "package", "file": model.file}
                    | {"sha256": model.sha256, "packages": [requirement for requirement, _ in model.parts]}
                    for model in models
                ]
            },
        )
        return
    console.table(("alias", "model", "from"), [(model.alias, model.title, model.where) for model in models])
    console.say("\nA hub id (org/name or org/name@revision), a model folder or a .gguf file works as well as an alias.")


@command.command("fetch", help="Fetch MODEL into the cache and print where it is.")
@click.argument("model")
@source_options
@common_options
@pass_console
def fetch(console: Console, model: str, revision: str | None, offline: bool, as_json: bool) -> None:
    from w4a4.calibrate.fetch import locate

    location = locate(model, offline=offline, revision=revision)
    if as_json:
        console.document(
            "fetched-model",
            {"model": model, "kind": location.kind, "path": location.path, "revision": location.revision},
        )
    else:
        console.data(str(location.path))
