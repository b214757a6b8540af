"""Where a measurement was made: device, driver, clocks, versions. What would have to be told to repeat it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "w4a4")
_GPU_FIELDS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")


def versions() -> dict[str, str]:
    """Of every package whose version may change a speed, as far as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def environment(device: torch.device) -> dict[str, Any]:
    """`gpu` (or `device`: the processor), `driver`, `versions`, threads and `clocks` as they are now."""
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = _nvidia_smi(device, ("driver_version",)).get("driver_version", "unknown")
        facts["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    else:
        facts["device"] = _processor()
        facts["threads"] = torch.get_num_threads()
    facts["versions"] = versions()
    return facts


def clocks(device: torch.device) -> dict[str, str]:
    """The GPU's clocks, power and temperature now, in nvidia-smi's words; empty on a CPU or without nvidia-smi."""
    return _nvidia_smi(device, _GPU_FIELDS) if device.type == "cuda" else {}


def _nvidia_smi(device: torch.device, fields: tuple[str, ...]) -> dict[str, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--id={device.index or 0}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.strip().split(",")), strict=False))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
