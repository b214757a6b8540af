"""Shapes of known models without their files: enough to run them with random weights."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from w4a4.configs.architecture import ModelConfig


def known_shapes() -> dict[str, dict[str, Any]]:
    """Alias -> the fields of its config.json that shape it."""
    text = files("w4a4.configs").joinpath("shapes.yaml").read_text(encoding="utf8")
    shapes: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return shapes


def shape_of(alias: str) -> ModelConfig | None:
    """The shape of a known model; None where it is not known."""
    fields = known_shapes().get(alias)
    return None if fields is None else ModelConfig.from_hf(fields)
