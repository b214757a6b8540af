from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from w4a4.configs.errors import CheckpointError
from w4a4.configs.generation_config import GenerationConfig, PartialSampling, read_generation_config


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_without_files_nothing_is_said(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig()
    assert GenerationConfig().sampling.said == {}


def test_what_qwen_says(tmp_path: Path) -> None:
    said = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    others = {"do_sample": True, "bos_token_id": 1, "max_new_tokens": 9, "min_p": None, "transformers_version": "5"}
    write(tmp_path, generation_config={**said, **others, "eos_token_id": [7, 8]}, config={"eos_token_id": 9})
    found = read_generation_config(tmp_path)
    assert found == GenerationConfig(frozenset({7, 8}), PartialSampling(0.7, 0.8, 20, None, 1.1))
    assert found.sampling.said == said
    assert str(found.sampling) == "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.1"


def test_ends_of_text_may_stand_in_config_json(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"temperature": 1}, config={"eos_token_id": 9})
    assert read_generation_config(tmp_path).eos_ids == {9}


def test_what_is_said_wins() -> None:
    model = PartialSampling(temperature=0.7, top_k=20)
    assert PartialSampling(temperature=0.0, min_p=0.1).or_else(model) == PartialSampling(0.0, None, 20, 0.1)
    assert PartialSampling(top_k=0).or_else(model).said == {"temperature": 0.7, "top_k": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", "0.7"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", 10**400),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("eos_token_id", "two"),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", 1.0),
        ("eos_token_id", True),
    ],
)
def test_values_that_make_no_sense_are_named(name: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, generation_config={name: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name} is .*, expected"):
        read_generation_config(tmp_path)
