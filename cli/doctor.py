"""`w4a4 doctor`: what this machine can do, one line per thing that matters, and what is missing.

Nothing is changed and nothing is downloaded; the hub is asked for no more than a connection.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click

from w4a4.cli.console import Console, format_bytes
from w4a4.cli.newest_checkpoint import newest_checkpoint, state_folder
from w4a4.cli.options import common_options, pass_console
from w4a4.configs.errors import NotFoundError, UnsupportedError

Status = Literal["ok", "note", "missing"]
REQUIRED = ("torch", "transformers", "safetensors", "gguf", "huggingface-hub", "tokenizers", "click", "rich", "pyyaml")
FOR_GPUS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")


@dataclass(frozen=True)
class Observation:
    """`missing` keeps w4a4 from working here; `note` limits what it can do."""

    subject: str
    status: Status
    found: str


@click.command(
    "doctor", help="Look at this machine: what will run here, and what is missing. Exit code 4 if w4a4 cannot."
)
@common_options
@pass_console
def command(console: Console, as_json: bool) -> None:
    observations = list(observe())
    if as_json:
        console.document("doctor", {"observations": [asdict(observation) for observation in observations]})
    else:
        marks = {"ok": "ok", "note": "note", "missing": "MISSING"}
        console.table(
            ("", "what", "found"),
            [(marks[observation.status], observation.subject, observation.found) for observation in observations],
        )
    missing = [observation.subject for observation in observations if observation.status == "missing"]
    if missing:
        raise UnsupportedError(
            f"this machine cannot run w4a4: {', '.join(missing)}", "pip install w4a4 in a fresh venv"
        )


def observe() -> Iterator[Observation]:
    """Look at everything, the cheap things first."""
    yield Observation("w4a4", "ok", importlib.metadata.version("w4a4"))
    is_new = sys.version_info >= (3, 11)
    yield Observation("Python", "ok" if is_new else "missing", f"{platform.python_version()} ({sys.executable})")
    yield Observation("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield from _packages()
    yield from _processor()
    yield from _gpus()
    yield from _folders()
    yield _hub()
    yield _newest()


def _packages() -> Iterator[Observation]:
    for name in REQUIRED:
        found = _version(name)
        yield Observation(name, "ok" if found else "missing", found or "not installed")
    for name in FOR_GPUS:
        found = _version(name)
        yield Observation(name, "ok" if found else "note", found or "not installed: GPU kernels need w4a4[gpu]")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> Iterator[Observation]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    wanted = [
        name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if name in flags
    ]
    yield Observation("processor", "ok", f"{cores} cores; {' '.join(wanted) or 'no vector extensions known'}")
    memory = _memory()
    if memory:
        total, available = memory
        yield Observation("memory", "ok", f"{format_bytes(available)} of {format_bytes(total)} available")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


def _memory() -> tuple[int, int] | None:
    """(total, available) bytes as the kernel states them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])


def _gpus() -> Iterator[Observation]:
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        built = (
            f"this PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this PyTorch has no CUDA"
        )
        yield Observation("GPU", "note", f"none seen; {built}. Models run on the processor (reference-cpu)")
        return
    from w4a4.serve.device import why_no_kernels

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = f"{properties.name}, sm_{properties.major}{properties.minor}, {format_bytes(properties.total_memory)}"
        reason = why_no_kernels(torch.device("cuda", index))
        yield Observation(f"GPU {index}", "note" if reason else "ok", f"{name}; {reason or 'our kernels run on it'}")


def _folders() -> Iterator[Observation]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from w4a4.calibrate.fetch import cache_folder

    for subject, folder in (
        ("model cache", cache_folder()),
        ("hub cache", Path(HF_HUB_CACHE)),
        ("state", state_folder()),
    ):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = format_bytes(shutil.disk_usage(existing).free)
        is_writable = os.access(existing, os.W_OK)
        yield Observation(
            subject, "ok" if is_writable else "note", f"{folder} ({free} free{'' if is_writable else ', not writable'})"
        )


def _hub() -> Observation:
    from w4a4.calibrate.fetch import hub_is_reachable

    if hub_is_reachable():
        return Observation("hub", "ok", "reachable")
    return Observation("hub", "note", "not reachable: models come from the caches, folders, or `w4a4 models fetch`")


def _newest() -> Observation:
    try:
        return Observation("newest checkpoint", "ok", str(newest_checkpoint()))
    except NotFoundError:
        return Observation("newest checkpoint", "note", "none written yet")
