"""The kernel cache: what names an entry, what is compiled once, and what a machine without the compiler hears."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from w4a4.kernels import compile_cache
from w4a4.kernels.compile_cache import CompilerMissingError, Kernel, compile_to, default_folder, entry


class Exported:
    """Stands for the DSL's compiled function: records the architecture it was built for."""

    def __init__(self, log: list[str]) -> None:
        log.append(os.environ["CUTE_DSL_ARCH"])

    def export_to_c(self, path: str, symbol: str) -> None:
        Path(path).write_text(symbol)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile_cache, "dsl_version", lambda: "4.8.1")
    monkeypatch.setattr(compile_cache, "_link", lambda target: target.with_suffix(".so").write_text("linked"))
    path = tmp_path / "kernel.py"
    path.write_text("one")
    return path


def test_compiles_once_for_the_named_architecture(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    log: list[str] = []
    kernel = Kernel("gemm", (source,), lambda: Exported(log))
    folder = tmp_path / "cache"
    first, second = compile_to(kernel, "sm_90a", folder), compile_to(kernel, "sm_90a", folder)
    assert first == second == entry(kernel, "sm_90a", folder)
    assert log == ["sm_90a"] and os.environ["CUTE_DSL_ARCH"] == "sm_100a"
    assert first.read_text() == "w4a4_" + first.stem.rsplit("-", 1)[1]
    assert sorted(path.suffix for path in folder.iterdir()) == [".o", ".so"]


def test_everything_that_decides_the_bytes_is_in_the_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("gemm", (source,), lambda: None)
    names = {entry(kernel, "sm_90a", tmp_path).name, entry(kernel, "sm_80", tmp_path).name}
    names.add(entry(Kernel("other", (source,), lambda: None), "sm_90a", tmp_path).name)
    source.write_text("two")
    names.add(entry(kernel, "sm_90a", tmp_path).name)
    monkeypatch.setattr(compile_cache, "dsl_version", lambda: "4.9.0")
    names.add(entry(kernel, "sm_90a", tmp_path).name)
    assert len(names) == 5


def test_a_failed_build_leaves_nothing(source: Path, tmp_path: Path) -> None:
    class Broken:
        def export_to_c(self, path: str, symbol: str) -> None:
            Path(path).write_text("half")
            raise OSError("disk full")

    folder = tmp_path / "cache"
    with pytest.raises(OSError, match="disk full"):
        compile_to(Kernel("gemm", (source,), Broken), "sm_90a", folder)
    assert not list(folder.iterdir())


def test_without_the_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(CompilerMissingError, match=r"pip install 'w4a4\[gpu\]'"):
        compile_cache.dsl_version()


def test_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("W4A4_KERNEL_CACHE", raising=False)
    assert default_folder() == tmp_path / "w4a4" / "kernels"
    monkeypatch.setenv("W4A4_KERNEL_CACHE", str(tmp_path / "elsewhere"))
    assert default_folder() == tmp_path / "elsewhere"
