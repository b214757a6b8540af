from __future__ import annotations

import json

import pytest

from w4a4.cli.console import Console, Progress, format_bytes, format_table, one_line, printable


def test_columns_are_aligned_numbers_to_the_right() -> None:
    assert format_table(("name", "N"), [("a", 5), ("long", 123)]) == "name    N\na       5\nlong  123"
    assert format_table(("x",), [(None,), (0.123456,)]) == "x\n-\n0.1235"
    assert format_table(("name", "N"), []) == "name  N"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3.2e9, "3.2 GB"), (5e12, "5.0 TB"), (7e15, "7000.0 TB")],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\nlines", "plain\nlines"),
        ("Größe 日本 🙂", "Größe 日本 🙂"),
        ("\x1b[2J\r\x07\t\x00", r"\x1b[2J\r\x07\t\x00"),
        ("\x9b31m \u202e \ud800", r"\x9b31m \u202e \ud800"),
    ],
)
def test_a_terminal_is_told_nothing_but_text(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(text) == shown
    console = Console()
    console.data(text)
    console.say(text)
    console.table(("name",), [(text.replace("\n", " "),)])
    captured = capsys.readouterr()
    assert captured.err == shown + "\n"
    assert captured.out.startswith(shown + "\nname\n") and not set(captured.out) & {"\x1b", "\u202e", "\r"}


def test_paragraphs_become_one_line() -> None:
    assert one_line("a\n\n  b\x1b\n") == r"a b\x1b"


def test_data_and_words_take_different_streams(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.data("result")
    console.say("word")
    console.set_verbosity(-1)
    console.say("silenced")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("result\n", "word\n")


def test_documents_name_their_schema(capsys: pytest.CaptureFixture[str]) -> None:
    Console().document("thing", {"ü": 1.5})
    text = capsys.readouterr().out
    assert json.loads(text) == {"schema": "w4a4.thing", "schema_version": 1, "ü": 1.5}
    Console().document("thing", {"x": "\x9b31m\u202e\ud800"})
    assert r"\u009b31m\u202e\ud800" in capsys.readouterr().out
    with pytest.raises(ValueError):
        Console().document("thing", {"x": float("nan")})


def test_progress_is_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress("layer") as progress:
        progress.step(1, 2, "error 0.1")
        progress.step(2, 2)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert lines[0].startswith("layer 1/2  ")
    assert lines[0].endswith(" s  error 0.1")
    assert lines[1].startswith("layer 2/2  ")


def test_quiet_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.set_verbosity(-1)
    with console.progress("layer") as progress:
        progress.step(1, 2)
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("layer", is_bar=True) as progress:
        progress.step(1, 2, "error 0.1")
    assert "1/2" in capsys.readouterr().err
