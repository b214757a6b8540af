"""A recipe: every choice that turns a float model into a packed checkpoint, as one flat, typed, frozen record.

Recipes are YAML files in `configs/recipes/`; a user's file may name one of them as its `base` and override keys.
Unknown keys, combinations that cannot be and keys that a method would not read are errors here, so that nothing below
re-checks them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from w4a4.configs.errors import UsageError

METHODS = ("uniform", "outlier_columns", "magnitude_blocks", "balanced_blocks")
ROUNDINGS = ("rtn", "gptq")
_READ_BY = {
    "outlier_share": ("outlier_columns",),
    "down_bits": ("uniform", "outlier_columns", "magnitude_blocks"),
    "budget": ("magnitude_blocks", "balanced_blocks"),
    "high_weight_bits": ("magnitude_blocks", "balanced_blocks"),
    "residual_basis": ("balanced_blocks",),
    "channel_balance": ("balanced_blocks",),
    "value_hadamard": ("balanced_blocks",),
    "down_hadamard": ("balanced_blocks",),
    "key_scaling": ("balanced_blocks",),
    "kv_mean": ("balanced_blocks",),
}
"""The methods that read a key; the keys that are not here are read by all."""


@dataclass(frozen=True)
class Recipe:
    """What to do to a model. Field comments name the paper where a choice comes from."""

    name: str
    summary: str
    method: str  # how channels get their precision: one of METHODS
    weight_bits: int = 4  # of channels whose activations run at `act_bits`
    act_bits: int = 4  # 4, 8, or 16 (not quantised)
    act_symmetric: bool = True  # False: QUIK's asymmetric 4-bit activations
    high_weight_bits: int = 8  # of channels whose activations run at 8 bits: 4 as in COMET, or 8
    budget: float = 0.0  # share of the MACs that may run at 8 bits: of every linear (FMPQ), else of the model
    outlier_share: float = 0.0  # outlier columns kept in 16 bits (QUIK: 256 of 4,096)
    down_bits: int = 0  # weight and activation bits of down_proj where it is treated apart (QUIK: 8); 0: as the rest
    rounding: str = "gptq"
    scale_search: bool = True  # int4 row scales by weighted squared error instead of absmax
    damping: float = 0.01  # of GPTQ's Hessian, relative to its mean diagonal
    group_size: int = 0  # columns per weight scale; 0: the whole row of a segment
    clip_search: bool = False  # 4-bit activation clip (c, beta) from calibration instead of absmax
    residual_basis: bool = False  # rotate the residual stream into its principal axes (ResQ)
    channel_balance: bool = False  # scale channels so that activations and weights share the error
    value_hadamard: bool = False  # Hadamard per kv-head between v_proj and o_proj (QuaRot)
    down_hadamard: int = 1  # block of the online Hadamard in front of down_proj, or less where its width asks for it
    key_scaling: bool = False  # balance q and k per RoPE pair
    kv_bits: int = 4
    kv_hadamard: bool = False  # Hadamard on q and k after RoPE (QuaRot)
    kv_mean: bool = False  # static mean off K and V (SageAttention)
    sink_tokens: int = 0  # first positions of a sequence kept in 16 bits
    tp_max: int = 0  # ranks that the checkpoint can be cut into; 0: the most of 8, 4, 2, 1 that cost no accuracy
    seed: int = 0

    def __post_init__(self) -> None:
        _check("method", self.method, METHODS)
        _check("rounding", self.rounding, ROUNDINGS)
        for key, allowed in (
            ("weight_bits", (4, 8)),
            ("act_bits", (4, 8, 16)),
            ("high_weight_bits", (4, 8)),
            ("down_bits", (0, 8)),
            ("kv_bits", (4, 16)),
            ("down_hadamard", (1, 32, 64, 128)),
            ("sink_tokens", (0, 4)),
            ("tp_max", (0, 1, 2, 4, 8)),
        ):
            _check(key, getattr(self, key), allowed)
        for key in ("budget", "outlier_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise UsageError(f"recipe {self.name}: {key} must lie in [0, 1], got {getattr(self, key)}")
        if not 0 < self.damping < math.inf:
            raise UsageError(f"recipe {self.name}: damping must be above 0 and finite, got {self.damping}")
        for field in fields(self):
            methods = _READ_BY.get(field.name, METHODS)
            if self.method not in methods and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"recipe {self.name}: method {self.method} does not read {field.name}",
                    f"leave it out, or choose method: {' or '.join(methods)}",
                )
        if self.method != "uniform" and (self.weight_bits, self.act_bits) != (4, 4):
            raise UsageError(
                f"recipe {self.name}: method {self.method} starts from 4-bit weights and activations, "
                f"got {self.weight_bits} and {self.act_bits}",
                "leave weight_bits and act_bits out, or choose method: uniform",
            )
        if self.weight_bits == 8 and self.act_bits == 4:
            raise UsageError(f"recipe {self.name}: 4-bit activations need 4-bit weights")
        if self.group_size < 0 or self.group_size % 8:
            raise UsageError(f"recipe {self.name}: group_size must be a multiple of 8, got {self.group_size}")
        if self.group_size and (self.act_bits != 16 or self.down_bits):
            raise UsageError(
                f"recipe {self.name}: group_size {self.group_size} needs 16-bit activations in every linear",
                "group scales inside the integer product are not supported: set group_size: 0",
            )

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)


def _check(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise UsageError(f"recipe: {key} is {value!r}, must be one of {', '.join(map(str, allowed))}")


def recipe_names() -> list[str]:
    """The recipes that ship, sorted."""
    return sorted(p.name.removesuffix(".yaml") for p in files("w4a4.configs").joinpath("recipes").iterdir()
                  if p.name.endswith(".yaml"))  # fmt: skip


def load_recipe(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a shipped recipe by name or a YAML file by path, then apply `overrides`.

    Raises:
        UsageError: unknown recipe, unknown key (naming the nearest valid ones), wrong type or value.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError(f"recipe file {path} does not exist", "give one of: " + ", ".join(recipe_names()))
        text = path.read_bytes()
    elif name_or_path in recipe_names():
        text = files("w4a4.configs").joinpath("recipes", f"{name_or_path}.yaml").read_bytes()
    else:
        raise UsageError(f"no recipe named {name_or_path!r}" + _nearest(name_or_path, recipe_names()),
                         "give a .yaml file or one of: " + ", ".join(recipe_names()))  # fmt: skip
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"recipe {name_or_path} is not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise UsageError(f"recipe {name_or_path} must be a mapping of keys, got {type(data).__name__}")
    base = data.pop("base", None)
    data |= overrides or {}
    types = {field.name: type_of for field in fields(Recipe) if (type_of := _TYPES[str(field.type)])}
    for key, value in data.items():
        if key not in types:
            raise UsageError(f"recipe {name_or_path}: unknown key {key!r}" + _nearest(str(key), list(types)),
                             "valid keys: " + ", ".join(types))  # fmt: skip
        if types[key] is float and type(value) is int:
            data[key] = float(value)
        elif type(value) is not types[key]:
            raise UsageError(f"recipe {name_or_path}: {key} must be {types[key].__name__}, got {value!r}")
    if base is not None:
        if base not in recipe_names():
            raise UsageError(f"recipe {name_or_path}: base must be a shipped recipe, got {base!r}",
                             "give one of: " + ", ".join(recipe_names()))  # fmt: skip
        changes: dict[str, Any] = {"name": path.stem, **data}
        return replace(load_recipe(base), **changes)
    missing = [key for key in ("name", "summary", "method") if key not in data]
    if missing:
        raise UsageError(f"recipe {name_or_path}: missing {', '.join(missing)}", "or name a shipped recipe as `base:`")
    return Recipe(**data)


_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


def _nearest(word: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(word, valid, 3, 0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
