"""What a model's authors say about generating with it, read from a Hugging Face `generation_config.json`.

Taken from it are the tokens that end an answer and the defaults of sampling, as vLLM takes them; everything else
(lengths, `do_sample`, beams) is left to whoever asks. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from w4a4.configs.errors import CheckpointError
from w4a4.configs.json_file import read_json_object

FILE: Final = "generation_config.json"

# Field -> lowest and highest value, as the sampler takes them.
_RANGES: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True)
class PartialSampling:
    """What somebody says about how tokens are chosen; None where nothing is said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def or_else(self, other: PartialSampling) -> PartialSampling:
        """These values, and those of `other` where nothing is said."""
        return PartialSampling(**(other.said | self.said))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.said.items())


NOTHING_SAID: Final = PartialSampling()


@dataclass(frozen=True)
class GenerationConfig:
    """`eos_ids` are the tokens that end an answer; empty where neither file names one."""

    eos_ids: frozenset[int] = frozenset()
    sampling: PartialSampling = NOTHING_SAID


def read_generation_config(folder: Path) -> GenerationConfig:
    """`generation_config.json` of `folder`, if there is one; without `eos_token_id` there, that of `config.json`.

    Raises:
        CheckpointError: not a JSON object, or a value that makes no sense.
    """
    path = folder / FILE
    declared = read_json_object(path) if path.is_file() else {}
    eos_ids = _eos_ids(declared, FILE)
    config = folder / "config.json"
    if not eos_ids and config.is_file():
        eos_ids = _eos_ids(read_json_object(config), config.name)
    values = {name: _in_range(declared.get(name), name) for name in _RANGES}
    return GenerationConfig(eos_ids, PartialSampling(**values))


def _eos_ids(declared: Mapping[str, Any], file: str) -> frozenset[int]:
    value = declared.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{file}: eos_token_id is {str(value)[:60]!r}, expected token ids")
    return frozenset(ids)


def _in_range(value: Any, name: str) -> Any:
    if value is None:
        return None
    low, high = _RANGES[name]
    kinds = (int,) if name == "top_k" else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
        expected = f"a {'whole ' if name == 'top_k' else ''}number between {low:g} and {high:g}"
        raise CheckpointError(f"{FILE}: {name} is {str(value)[:60]!r}, expected {expected}")
    return value
