from __future__ import annotations

import pytest

from w4a4.configs.aliases import known_models
from w4a4.configs.shapes import known_shapes, shape_of

# parameters in billions, as the models' own pages give them
SIZES = {
    "smollm2-135m": 0.1345, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.616, "qwen2.5-72b": 72.71, "qwen3-8b": 8.19,
    "qwen3-32b": 32.76, "mistral-7b": 7.248, "llama-7b": 6.738, "llama2-7b": 6.738, "llama2-13b": 13.016,
    "llama2-70b": 68.98, "llama3-8b": 8.03, "llama3-70b": 70.55, "llama3.1-8b": 8.03, "llama3.1-70b": 70.55,
}  # fmt: skip


def test_every_known_model_has_a_shape() -> None:
    assert known_shapes().keys() == known_models().keys()


@pytest.mark.parametrize("alias", SIZES)
def test_the_shape_has_as_many_parameters_as_the_model(alias: str) -> None:
    config = shape_of(alias)
    assert config is not None
    assert config.num_parameters / 1e9 == pytest.approx(SIZES[alias], rel=2e-3)


def test_unknown() -> None:
    assert shape_of("llama9-1b") is None
