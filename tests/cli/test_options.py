"""Where an option's value comes from: flag > environment > --config > default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from w4a4.cli.console import Console
from w4a4.cli.options import common_options, option
from w4a4.configs.errors import UsageError


@click.command("sample")
@option("--seq", type=int, default=1)
@option("--max-tokens", type=int, default=2)
@option("-o", "--output")
@common_options
def sample(seq: int, max_tokens: int, output: str | None, as_json: bool) -> None:
    click.echo(f"{seq} {max_tokens} {output} {as_json}")


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    sample.main(args=list(arguments), obj=Console(), standalone_mode=False)
    return capsys.readouterr().out.strip()


def test_each_source_beats_the_ones_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("seq: 10\nmax-tokens: 20\noutput: there\njson: true\n")
    assert result(capsys) == "1 2 None False"
    assert result(capsys, "--config", str(config)) == "10 20 there True"
    monkeypatch.setenv("W4A4_SEQ", "100")
    assert result(capsys, "--config", str(config)) == "100 20 there True"
    assert result(capsys, "--config", str(config), "--seq", "1000") == "1000 20 there True"
    assert result(capsys, "--seq", "1000", "--config", str(config)) == "1000 20 there True"
    monkeypatch.setenv("W4A4_SEQ", "many")
    with pytest.raises(click.BadParameter, match="many"):
        result(capsys)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("sqe: 1\n", "no option 'sqe'", "nearest: seq"),
        ("zzzzzz: 1\n", "no option 'zzzzzz'", "options: "),
        ("- 1\n", "got list", ""),
        ("a: [\n", "not valid YAML", ""),
        ("[" * 5000, "not valid YAML", ""),
    ],
)
def test_files_that_cannot_be_meant(text: str, said: str, hint: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(UsageError, match=said) as refused:
        sample.main(args=["--config", str(config)], obj=Console(), standalone_mode=False)
    assert refused.value.hint.startswith(hint)


@pytest.mark.parametrize("value", ["[1]", "true", "{a: 1}", "2026-11-30", "\u0663", ".nan"])
def test_a_number_in_a_file_is_a_number(value: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"seq: {value}\n")
    with pytest.raises(click.BadParameter, match="is not a"):
        sample.main(args=["--config", str(config)], obj=Console(), standalone_mode=False)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere.yaml"):
        sample.main(args=["--config", "nowhere.yaml"], obj=Console(), standalone_mode=False)


def test_verbosity_reaches_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in (([], 0), (["-v"], 1), (["-vv"], 2), (["-q"], -1)):
        console: Any = Console()
        sample.main(args=flags, obj=console, standalone_mode=False)
        assert console.verbosity == expected
