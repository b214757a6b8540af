"""Prints docs/commands.md: the help text of every command. `make docs` writes it, a test compares it."""

from __future__ import annotations

import click

from w4a4.cli.main import COMMANDS, w4a4

WIDTH = 100


def reference() -> str:
    """The whole page as Markdown."""
    parts = ["# Commands\n", "Written by `make docs` from the help texts; change those instead.\n"]
    root = click.Context(w4a4, info_name="w4a4", terminal_width=WIDTH, max_content_width=WIDTH)
    parts.append(f"```\n{w4a4.get_help(root)}\n```\n")
    for name in COMMANDS:
        command = w4a4.get_command(root, name)
        assert command is not None
        parts += _sections(command, click.Context(command, parent=root, info_name=name, terminal_width=WIDTH))
    return "\n".join(parts)


def _sections(command: click.Command, context: click.Context) -> list[str]:
    context.max_content_width = WIDTH
    sections = [f"## {context.command_path}\n", f"```\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            sections += _sections(child, click.Context(child, parent=context, info_name=name, terminal_width=WIDTH))
    return sections


if __name__ == "__main__":
    print(reference(), end="")
