from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest

from w4a4.cli.main import COMMANDS, w4a4

NO_HINT = ""  # the message says it all
ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1"}


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    """Processor time, which other programs on this machine change less than the clock's."""
    program = (
        "import sys, time\nfrom w4a4.cli.main import run\ncode = run(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml', 'safetensors', 'rich'} & set(sys.modules)\n"
        "print(time.process_time(), file=sys.stderr)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)\n"
    )
    command = [sys.executable, "-c", program]
    seconds = []
    for _ in range(5):
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stderr))
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_without_pytorch(name: str) -> None:
    program = (
        f"import sys\nfrom w4a4.cli.main import run\ncode = run(['{name}', '--help'])\n"
        "sys.exit('loaded torch' if 'torch' in sys.modules else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: w4a4 {name}")


def test_help_lists_every_command_and_exit_code(invoke: Any) -> None:
    result = invoke("--help")
    assert result.code == 0
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line[:30])}", result.out, re.MULTILINE), name
    assert "Exit codes: 0 done, 1 our bug" in result.out


def test_version_is_the_packages_own(invoke: Any) -> None:
    assert invoke("--version").out == f"w4a4 {version('w4a4')}\n"


def test_every_option_has_help_and_an_environment_variable() -> None:
    context = click.Context(w4a4)
    plain = {"as_json", "config", "verbose", "quiet", "help"}
    for name in COMMANDS:
        command = w4a4.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in plain:
                assert parameter.envvar, (name, parameter.name)


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["quantise"], "Did you mean quantize?", "w4a4 --help"),
        (["frobnicate"], "No such command 'frobnicate'", "w4a4 --help"),
        (["verify", "--josn"], "--json", "w4a4 verify --help"),
        (["quantize", "x", "--sampels", "3"], "--samples", "w4a4 quantize --help"),
        (["quantize"], "Missing argument", "w4a4 quantize --help"),
        (["quantize", "x", "--samples", "0"], "--samples", "w4a4 quantize --help"),
        (["quantize", "x", "--set", "budget=[1"], "--set budget=[1: the value is no YAML", NO_HINT),
        (["quantize", "x", "--set", "budget=!!python/name:os.system"], "the value is no YAML", NO_HINT),
        (["quantize", "x", "--set", "name=\x1b[2J"], r"--set name=\x1b[2J: the value is no YAML", NO_HINT),
        (["quantize", "x", "--gate-tokens", "1"], "there must be two", "or 0: no gate"),
        (["eval", "x", "--act", "a3"], "--act", "w4a4 eval --help"),
        (["eval", "x", "--fail-if-ppl-above", "nan"], "nan is not a finite number", "w4a4 eval --help"),
        (["generate", "x", "--temperature", "inf"], "inf is not a finite number", "w4a4 generate --help"),
        (["serve", "x", "--kv-cache-memory", "1e30"], "--kv-cache-memory", "w4a4 serve --help"),
        (["eval", "x", "--seq", "\u0663\u0662"], "is not a number in ASCII digits", "w4a4 eval --help"),
        (["generate", "x", "--temperature", "\u0660.5"], "is not a number in ASCII digits", "w4a4 generate --help"),
    ],
)
def test_usage_errors_end_with_2_and_what_to_type(invoke: Any, arguments: list[str], said: str, hint: str) -> None:
    result = invoke(*arguments)
    assert result.code == 2
    assert result.out == ""
    message, *try_this = result.err.strip().splitlines()
    assert message.startswith("error: ")
    assert said in message
    assert try_this == ([] if hint == NO_HINT else [f"  try: {hint}"])


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from w4a4.cli.main import main; main()' models 2>err.txt | head -1; cat err.txt",
        shell=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("alias")
    assert "Traceback" not in done.stdout


def test_without_a_command_it_says_how_to_begin(invoke: Any) -> None:
    result = invoke()
    assert result.code == 2
    assert result.out == ""
    for command in ("w4a4 quantize smollm2-135m", "w4a4 generate", "w4a4 serve --port 8000", "w4a4 --help"):
        assert command in result.err
