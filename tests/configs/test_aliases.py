from __future__ import annotations

import re

from w4a4.configs.aliases import HubModel, PackagedModel, known_models, nearest_aliases

PROMISED = """llama-7b llama2-7b llama2-13b llama2-70b llama-70b llama3-8b llama3-70b llama3.1-8b llama3.1-70b
qwen2.5-0.5b qwen2.5-7b qwen2.5-72b qwen3-8b qwen3-32b mistral-7b smollm2-135m qwen2.5-coder-0.5b""".split()


def test_every_promised_alias_is_there_and_pinned() -> None:
    models = known_models()
    assert set(PROMISED) <= set(models)
    for model in models.values():
        if isinstance(model, HubModel):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.repo)
            assert re.fullmatch(r"[0-9a-f]{40}", model.revision), model.alias
        else:
            assert isinstance(model, PackagedModel)
            assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
            assert all("==" in requirement for requirement, _ in model.parts)


def test_llama_70b_is_a_named_llama_3() -> None:
    model = known_models()["llama-70b"]
    assert isinstance(model, HubModel)
    assert (model.repo, model.title) == ("meta-llama/Meta-Llama-3-70B", "Llama 3 70B")


def test_misspelt_names_find_their_neighbours() -> None:
    assert "llama-70b" in nearest_aliases("lama-70b")
    assert nearest_aliases("SMOLLM2-135M")[0] == "smollm2-135m"
    assert nearest_aliases("zzzz") == []
