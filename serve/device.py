"""Which device a model runs on: the one that is named, or the best that is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from w4a4.configs.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch


def choose_device(name: str | None, *, for_kernels: bool = False) -> torch.device:
    """The device called `name`, or the best one: the first CUDA device, else the processor.

    Args:
        for_kernels: our own kernels will run there, so a GPU without them is passed over (unnamed) or refused (named).

    Raises:
        UsageError: not a device's name.
        UnsupportedError: that device is not here, or has no kernels.
    """
    import torch

    if name is None:
        is_usable = torch.cuda.is_available() and (not for_kernels or why_no_kernels(torch.device("cuda")) is None)
        return torch.device("cuda" if is_usable else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{name!r} is not a device", "cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name!r} is not a device that w4a4 runs on", "cpu, cuda or cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise UnsupportedError(f"{name} was asked for but is not here", "--device cpu; `w4a4 doctor` says what is")
        if for_kernels and (reason := why_no_kernels(device)):
            raise UnsupportedError(reason, "--device cpu")
    return device


def why_no_kernels(device: torch.device) -> str | None:
    """Why our kernels do not run on `device`; None if they do."""
    from w4a4.kernels import ops

    try:
        ops.backend_of(device)
    except ops.UnsupportedDeviceError as error:
        return str(error)
    return None
