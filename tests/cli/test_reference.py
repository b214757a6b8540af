"""docs/commands.md says what the commands say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_commands_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/command_reference.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "docs/commands.md").read_text(), "run `make docs`"
