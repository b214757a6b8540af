from __future__ import annotations

import pytest
import torch

from w4a4.configs.errors import UnsupportedError, UsageError
from w4a4.serve.device import choose_device, why_no_kernels


@pytest.mark.parametrize("name", ["tpu9", "mps", "cpu:x", ""])
def test_names_that_are_no_device_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="device"):
        choose_device(name)


def test_the_processor_is_always_there() -> None:
    assert choose_device("cpu", for_kernels=True) == torch.device("cpu")
    assert why_no_kernels(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_the_default_and_a_gpu_is_refused() -> None:
    assert choose_device(None) == torch.device("cpu")
    assert choose_device(None, for_kernels=True) == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="not here") as refused:
        choose_device("cuda:0")
    assert "w4a4 doctor" in refused.value.hint


def test_a_gpu_without_kernels_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from w4a4.kernels import ops

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ops, "_cuda_properties", lambda index: ("Old GPU", (7, 5)))
    assert choose_device(None) == torch.device("cuda")
    assert choose_device(None, for_kernels=True) == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="Old GPU"):
        choose_device("cuda", for_kernels=True)
    monkeypatch.setattr(ops, "_cuda_properties", lambda index: ("H200", (9, 0)))
    assert choose_device("cuda", for_kernels=True) == torch.device("cuda")
