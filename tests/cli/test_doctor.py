from __future__ import annotations

from typing import Any

import pytest

from w4a4.cli import doctor


def test_it_sees_this_machine(invoke: Any) -> None:
    import torch

    result = invoke("doctor")
    assert result.code == 0
    document = invoke("doctor", "--json").document
    found = {entry["subject"]: entry for entry in document["observations"]}
    assert found["torch"]["found"] == torch.__version__
    assert found["Python"]["status"] == "ok"
    assert found["hub"]["status"] == "note"
    assert found["newest checkpoint"]["status"] == "note"
    for subject in found:
        assert subject in result.out
    if not torch.cuda.is_available():
        assert "reference-cpu" in found["GPU"]["found"]


def test_a_missing_package_is_told_and_ends_with_4(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no-such-package"))
    result = invoke("doctor")
    assert result.code == 4
    assert "MISSING  no-such-package" in result.out
    assert "cannot run w4a4: no-such-package" in result.err
