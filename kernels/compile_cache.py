"""Compiled kernels on disk: a process loads machine code in milliseconds, and a machine without a GPU can make it.

An entry is the object file that the CuTe DSL exports for one kernel, named after everything that decides its bytes: GPU
architecture, DSL version, kernel name, and a hash of the source files. Where a C compiler is at hand the object is also
linked into a shared library, which loads without importing the DSL (a second saved in every process, and a machine that
only runs needs `apache-tvm-ffi` alone). The cache knows nothing about any particular kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DSL_PACKAGE = "nvidia-cutlass-dsl"
# What the DSL's static runtime lacks: the function its exported objects call when a launch fails.
_LAUNCH_ERROR_SOURCE = """
#include <stdio.h>
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char*, const char**, int), int code) {
  char text[32];
  snprintf(text, sizeof text, "CUDA error %d", code);
  const char* parts[2] = {"kernel launch failed: ", text};
  if (raise) raise("RuntimeError", parts, 2);
}
"""


class CompilerMissingError(RuntimeError):
    """A kernel is not in the cache and the DSL that would compile it is not installed."""


@dataclass(frozen=True)
class Kernel:
    """Something that can be compiled.

    name:    identifies it among the kernels of its sources, as a file name: letters, digits, '_', '-'
    sources: files whose bytes decide the result
    build:   compiles and returns the DSL's compiled function; the architecture is set around the call
    """

    name: str
    sources: tuple[Path, ...]
    build: Callable[[], Any]


def default_folder() -> Path:
    """$W4A4_KERNEL_CACHE, else w4a4/kernels in the user's cache folder."""
    named = os.environ.get("W4A4_KERNEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "w4a4" / "kernels"


def dsl_version() -> str:
    """Version of the installed CuTe DSL.

    Raises:
        CompilerMissingError: it is not installed.
    """
    try:
        return importlib.metadata.version(_DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CompilerMissingError(
            f"{_DSL_PACKAGE} is not installed: pip install 'w4a4[gpu]' (or point W4A4_KERNEL_CACHE at compiled kernels)"
        ) from None


def entry(kernel: Kernel, arch: str, folder: Path) -> Path:
    """Where the object file of a kernel belongs; it need not exist."""
    digest = hashlib.sha256()
    for part in (arch, dsl_version(), kernel.name):
        digest.update(part.encode() + b"\0")
    for source in kernel.sources:
        digest.update(source.read_bytes())
    return folder / f"{kernel.name}-{arch}-{digest.hexdigest()[:16]}.o"


def compile_to(kernel: Kernel, arch: str, folder: Path) -> Path:
    """The object file of a kernel, compiled now unless it is in `folder`, linked if possible; needs no GPU."""
    target = entry(kernel, arch, folder)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _architecture(arch):
            compiled = kernel.build()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            object_file = Path(scratch) / "kernel.o"
            compiled.export_to_c(str(object_file), _symbol(target))
            os.replace(object_file, target)
    if not target.with_suffix(".so").exists():
        _link(target)
    return target


def load(kernel: Kernel, arch: str, folder: Path | None = None) -> Callable[..., Any]:
    """A kernel as a function of tensors and integers; compiled first if it is in no cache.

    The result launches on the current PyTorch stream and may be captured in a CUDA graph.
    """
    target = compile_to(kernel, arch, folder or default_folder())
    library = target.with_suffix(".so")
    if library.exists():
        import tvm_ffi

        ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
        function: Callable[..., Any] = tvm_ffi.load_module(str(library))[_symbol(target)]
        return function
    from cutlass.cute.runtime import load_module

    loaded: Callable[..., Any] = getattr(load_module(str(target), enable_tvm_ffi=True), _symbol(target))
    return loaded


def _symbol(target: Path) -> str:
    return "w4a4_" + target.stem.rsplit("-", 1)[1]


def _link(target: Path) -> None:
    """Make a shared library of an object file that needs nothing of the DSL; without a C compiler do nothing."""
    compiler = shutil.which("cc")
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if compiler is None or spec is None or not spec.submodule_search_locations:
        return
    archive = Path(spec.submodule_search_locations[0]) / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
    if not archive.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source = Path(scratch) / "launch_error.c"
        source.write_text(_LAUNCH_ERROR_SOURCE)
        library = Path(scratch) / "kernel.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-z,lazy", "-o", str(library), str(source), str(target)]
        subprocess.run([*command, str(archive)], check=True, capture_output=True)
        os.replace(library, target.with_suffix(".so"))


@contextmanager
def _architecture(arch: str) -> Iterator[None]:
    """The DSL reads its target from the environment and guesses a newer GPU where there is none."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before
