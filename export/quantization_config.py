"""`quantization_config` of a checkpoint's config.json: format version, required features, and the check of every key.

Unknown keys are errors, except in a checkpoint of a newer minor version, where they are optional by definition and
ignored. A newer major version, or a required feature this reader does not know, is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from w4a4.configs.errors import CheckpointError, UnsupportedError

QUANT_METHOD = "w4a4"
FORMAT_VERSION = "1.0"
FEATURES = {
    "int8-weights": "a segment of int8 weights (`.weight_int8`)",
    "outlier-columns": "columns kept in bf16 (`.weight_outlier`)",
    "group-scales": "weight scales per group of columns",
    "asymmetric-activations": "4-bit activations with a zero point per token",
    "down-hadamard": "an online block Hadamard before down_proj",
    "kv4": "a KV cache of 4-bit codes as the numeric contract defines it",
    "qk-hadamard": "an online Hadamard on q and k",
    "k-mean": "a per-channel mean taken off K (`.self_attn.k_mean`)",
    "sink-tokens": "first positions of a sequence kept in 16 bit",
}

_UPDATE_HINT = "update w4a4, or write the checkpoint again with this version"


@dataclass(frozen=True)
class LayoutRules:
    """What the layout of a linear takes from quantization_config and not from its own tensors.

    `is_symmetric` concerns 4-bit activations; `down_hadamard` is the block of the online Hadamard on down_proj's input
    (1: none); `has_group_scales`: weight-only linears have a scale per group of columns.
    """

    is_symmetric: bool = True
    down_hadamard: int = 1
    has_group_scales: bool = False

    @classmethod
    def of(cls, quantization: Mapping[str, Any]) -> LayoutRules:
        return cls(
            is_symmetric=quantization["activations"]["symmetric"],
            down_hadamard=quantization["transforms"]["down_hadamard"],
            has_group_scales=quantization["weights"]["group_size"] > 0,
        )

    def hadamard(self, prefix: str) -> int:
        return self.down_hadamard if prefix.endswith("down_proj") else 1


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_power_of_two(value: object) -> bool:
    return type(value) is int and value > 0 and value & (value - 1) == 0


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _one_of(*allowed: object) -> Callable[[object], bool]:
    return lambda value: any(type(value) is type(item) and value == item for item in allowed)


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: type(value) is kind


_Check = tuple[str, Callable[[object], bool]]
_SCHEMA: dict[str, _Check | dict[str, _Check]] = {
    "quant_method": ("w4a4", _one_of(QUANT_METHOD)),
    "format_version": ("a string", _is(str)),
    "required_features": ("a list of strings", _is_names),
    "producer": {"name": ("a string", _is(str)), "version": ("a string", _is(str))},
    "recipe": ("a string", _is(str)),
    "block_size": ("a power of two", _is_power_of_two),
    "weights": {
        "bits": ("4 or 8", _one_of(4, 8)),
        "group_size": ("a whole number >= 0", _is_count),
        "symmetric": ("true", _one_of(True)),
    },
    "activations": {
        "bits": ("4, 8 or 16", _one_of(4, 8, 16)),
        "symmetric": ("true or false", _is(bool)),
        "default_act": ("map, a8 or a16", _one_of("map", "a8", "a16")),
    },
    "kv_cache": {
        "bits": ("4 or 16", _one_of(4, 16)),
        "qk_hadamard": ("true or false", _is(bool)),
        "k_mean": ("true or false", _is(bool)),
        "sink_tokens": ("a whole number >= 0", _is_count),
    },
    "transforms": {"down_hadamard": ("a power of two", _is_power_of_two)},
    "permutation": {"tp_max": ("a whole number > 0", lambda value: _is_count(value) and value != 0)},
    "modules_to_not_convert": ("a list of strings", _is_names),
}


def read_quantization_config(hf_config: Mapping[str, Any], file: str = "config.json") -> dict[str, Any]:
    """The checked `quantization_config` of a config.json.

    Raises:
        UnsupportedError: not a w4a4 checkpoint, another major version, an unknown required feature.
        CheckpointError: a key is missing, misspelt or has a wrong value.
    """
    raw = hf_config.get("quantization_config")
    if not isinstance(raw, dict) or raw.get("quant_method") != QUANT_METHOD:
        method = raw.get("quant_method") if isinstance(raw, dict) else raw
        raise UnsupportedError(
            f"{file}: not a w4a4 checkpoint: got quant_method {method!r}, expected {QUANT_METHOD!r}",
            "make one with `w4a4 quantize MODEL -o DIR`",
        )
    is_newer_minor = _check_version(raw.get("format_version"), file)
    features = raw.get("required_features")
    if not _is_names(features):
        raise _corrupt(file, "required_features", features, "a list of strings")
    assert isinstance(features, list)
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise UnsupportedError(
            f"{file}: requires {', '.join(unknown)}, which this reader does not know (it knows {', '.join(FEATURES)})",
            _UPDATE_HINT,
        )
    for key, rule in _SCHEMA.items():
        if key not in raw:
            raise _corrupt(file, key, "nothing", "the key")
        if isinstance(rule, dict):
            _check_section(raw[key], key, rule, is_newer_minor, file)
        else:
            _check_value(raw[key], key, rule, file)
    _check_no_unknown(raw, _SCHEMA, "", is_newer_minor, file)
    return dict(raw)


def required_features(quantization: Mapping[str, Any], tensor_names: set[str]) -> list[str]:
    """The features a reader must know for this config and these tensors, sorted; what the writer declares."""
    kv_cache = quantization["kv_cache"]
    used = {
        "int8-weights": any(name.endswith(".weight_int8") for name in tensor_names),
        "outlier-columns": any(name.endswith(".weight_outlier") for name in tensor_names),
        "group-scales": quantization["weights"]["group_size"] > 0,
        "asymmetric-activations": not quantization["activations"]["symmetric"],
        "down-hadamard": quantization["transforms"]["down_hadamard"] > 1,
        "kv4": kv_cache["bits"] == 4,
        "qk-hadamard": kv_cache["qk_hadamard"],
        "k-mean": kv_cache["k_mean"],
        "sink-tokens": kv_cache["sink_tokens"] > 0,
    }
    return sorted(name for name, is_used in used.items() if is_used)


def _check_version(version: object, file: str) -> bool:
    """True where the checkpoint's minor version is newer than ours."""
    match = re.fullmatch(r"([0-9]{1,6})\.([0-9]{1,6})", version) if isinstance(version, str) else None
    if match is None:
        raise _corrupt(file, "format_version", version, f"MAJOR.MINOR such as {FORMAT_VERSION}")
    major, minor = int(match[1]), int(match[2])
    our_major, our_minor = map(int, FORMAT_VERSION.split("."))
    if major != our_major:
        raise UnsupportedError(
            f"{file}: checkpoint format {version}; this version reads {our_major}.x",
            _UPDATE_HINT,
        )
    return minor > our_minor


def _check_section(value: object, key: str, rules: dict[str, _Check], is_newer_minor: bool, file: str) -> None:
    if not isinstance(value, dict):
        raise _corrupt(file, key, value, "an object")
    for name, rule in rules.items():
        if name not in value:
            raise _corrupt(file, f"{key}.{name}", "nothing", rule[0])
        _check_value(value[name], f"{key}.{name}", rule, file)
    _check_no_unknown(value, rules, f"{key}.", is_newer_minor, file)


def _check_value(value: object, key: str, rule: _Check, file: str) -> None:
    expected, is_valid = rule
    if not is_valid(value):
        raise _corrupt(file, key, value, expected)


def _check_no_unknown(
    value: Mapping[str, Any], known: Mapping[str, Any], prefix: str, is_newer_minor: bool, file: str
) -> None:
    unknown = sorted(set(value) - set(known))
    if unknown and not is_newer_minor:
        names = ", ".join(prefix + name for name in unknown)
        raise _corrupt(file, names, "an unknown key", f"only {', '.join(known)}")


def _corrupt(file: str, key: str, got: object, expected: str) -> CheckpointError:
    shown = got if got in ("nothing", "an unknown key") else repr(got)[:100]
    return CheckpointError(f"{file}: quantization_config.{key}: got {shown}, expected {expected}", _UPDATE_HINT)
