"""`w4a4 verify`: every fault of a checkpoint, or the word that there is none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from w4a4.cli.console import Console, one_line
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, pass_console
from w4a4.configs.errors import CheckpointError, NumericsError


@click.command(
    "verify",
    help="Check the checkpoint in DIR: the hash of every file, names, dtypes, shapes and values of every tensor, and "
    "the files of the tokenizer.",
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@common_options
@pass_console
def command(console: Console, folder: Path | None, as_json: bool) -> None:
    from w4a4.export.verify import verify_checkpoint

    if folder is None:
        folder = newest_checkpoint()
        console.say(f"checking the newest checkpoint, {folder}")
    findings = verify_checkpoint(folder, lambda name: console.say(f"checking {name}") if console.verbosity else None)
    if as_json:
        console.document(
            "verification",
            {"path": folder, "is_intact": not findings, "findings": [asdict(finding) for finding in findings]},
        )
    else:
        for finding in findings:
            console.data(one_line(str(finding)))
    if findings:
        kind = NumericsError if all(finding.is_numeric for finding in findings) else CheckpointError
        raise kind(
            f"{folder}: {len(findings)} fault{'s' if len(findings) > 1 else ''} found",
            "fetch or write the checkpoint again",
        )
    if not as_json:
        console.data(f"{folder}: intact")
