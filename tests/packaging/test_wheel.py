"""The built wheel in an environment that has only what the command line itself imports."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "kernels", "calibrate", "export", "serve", "configs")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "W4A4"))}


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, click and PyYAML, and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    interpreter = folder / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "--quiet", "click>=8.1", "pyyaml>=6.0", cwd=folder)
    run(interpreter, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=folder)
    return interpreter


def tracked(room: str) -> list[str]:
    """Every file of a room that git knows."""
    listed = subprocess.run(["git", "ls-files", room], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_it_holds_every_module_and_data_file_and_nothing_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        declared = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    files = [name for room in ROOMS for name in tracked(room)]
    assert any(name.endswith(".yaml") for name in files)
    assert any(name.startswith("calibrate/data/") for name in files)
    missing = [name for name in files if f"w4a4/{name}" not in names]
    assert not missing
    tops = {name.split("/")[0] for name in names}
    assert tops == {"w4a4", next(top for top in tops if top.endswith(".dist-info"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "[vllm.general_plugins]\nw4a4 = w4a4.serve.integrations.vllm.plugin:register" in declared


def test_the_command_runs_outside_the_repository(python: Path, tmp_path: Path) -> None:
    command = python.parent / "w4a4"
    version = run(python, "-c", "from importlib.metadata import version; print(version('w4a4'))", cwd=tmp_path).strip()
    assert run(command, "--version", cwd=tmp_path) == f"w4a4 {version}\n"
    assert "Commands:" in run(command, "--help", cwd=tmp_path)
    assert "smollm2-135m" in run(command, "models", cwd=tmp_path)
    program = "from w4a4.configs.recipe import load_recipe; print(load_recipe('dual').name)"
    assert run(python, "-c", program, cwd=tmp_path) == "dual\n"


def test_names_of_others_stay_theirs(python: Path, tmp_path: Path) -> None:
    program = f"from importlib.util import find_spec; print([name for name in {ROOMS!r} if find_spec(name)])"
    assert run(python, "-c", program, cwd=tmp_path) == "[]\n"
    program = "import w4a4.cli.main; print(w4a4.cli.main.__file__)"
    assert run(python, "-c", program, cwd=tmp_path).strip().startswith(str(python.parents[1]))
