from __future__ import annotations

from pathlib import Path
from typing import Any


def test_the_table_and_the_document_list_the_same(invoke: Any) -> None:
    table = invoke("models")
    assert table.code == 0
    document = invoke("models", "--json").document
    assert document["schema"] == "w4a4.models"
    aliases = [model["alias"] for model in document["models"]]
    assert [line.split()[0] for line in table.out.splitlines()[1:]] == aliases
    assert "smollm2-135m" in aliases


def test_fetching_without_a_hub_ends_with_3_and_what_to_type(invoke: Any) -> None:
    result = invoke("models", "fetch", "llama-70b")
    assert result.code == 3
    assert result.out == ""
    assert "llama-70b is Llama 3 70B: meta-llama/Meta-Llama-3-70B @ c82494877ce7" in result.err
    assert "hf download meta-llama/Meta-Llama-3-70B" in result.err
    assert invoke("models", "fetch", "smollm2-135m", "--offline").code == 3


def test_fetching_what_is_here_prints_its_path(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = invoke("models", "fetch", tmp_path / "model.gguf")
    assert (result.code, result.out) == (0, f"{tmp_path / 'model.gguf'}\n")
