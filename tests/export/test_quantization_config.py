from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest

from w4a4.configs.errors import CheckpointError, UnsupportedError
from w4a4.export.quantization_config import LayoutRules, read_quantization_config, required_features


@pytest.fixture
def quantization(tiny: ModuleType) -> dict[str, Any]:
    return copy.deepcopy(tiny.QUANTIZATION)


def test_a_sound_one_passes_unchanged(quantization: dict[str, Any]) -> None:
    assert read_quantization_config({"quantization_config": quantization}) == quantization
    assert LayoutRules.of(quantization) == LayoutRules(True, 32, False)


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "gptq"}}, {"quantization_config": 3}])
def test_not_ours(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="not a w4a4 checkpoint"):
        read_quantization_config(config)


@pytest.mark.parametrize("version", ["2.0", "10.3", "0.9"])
def test_another_major_version_is_refused(quantization: dict[str, Any], version: str) -> None:
    quantization["format_version"] = version
    with pytest.raises(UnsupportedError, match=f"format {version}; this version reads 1.x"):
        read_quantization_config({"quantization_config": quantization})


@pytest.mark.parametrize("version", [None, 1.0, "1", "1.x", "1.0.0"])
def test_a_version_that_is_none(quantization: dict[str, Any], version: object) -> None:
    quantization["format_version"] = version
    with pytest.raises(CheckpointError, match="expected MAJOR.MINOR"):
        read_quantization_config({"quantization_config": quantization})


def test_unknown_keys_of_a_newer_minor_are_ignored(quantization: dict[str, Any]) -> None:
    quantization["later"] = {"x": 1}
    quantization["kv_cache"]["later"] = 1
    with pytest.raises(CheckpointError, match="kv_cache.later: got an unknown key"):
        read_quantization_config({"quantization_config": quantization})
    quantization["format_version"] = "1.7"
    assert read_quantization_config({"quantization_config": quantization})["later"] == {"x": 1}


def test_an_unknown_required_feature_is_refused_by_name(quantization: dict[str, Any]) -> None:
    quantization["format_version"] = "1.7"
    quantization["required_features"] = ["kv4", "kv3", "zip-weights"]
    with pytest.raises(UnsupportedError, match="requires kv3, zip-weights, which this reader does not know"):
        read_quantization_config({"quantization_config": quantization})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("", "block_size", 96),
        ("", "recipe", None),
        ("weights", "bits", 3),
        ("weights", "symmetric", False),
        ("weights", "group_size", -1),
        ("activations", "symmetric", 1),
        ("activations", "default_act", "a4"),
        ("kv_cache", "bits", True),
        ("kv_cache", "sink_tokens", 4.0),
        ("transforms", "down_hadamard", 96),
        ("permutation", "tp_max", 0),
        ("", "modules_to_not_convert", "lm_head"),
        ("", "weights", [4]),
    ],
)
def test_wrong_values(quantization: dict[str, Any], section: str, key: str, value: object) -> None:
    (quantization[section] if section else quantization)[key] = value
    with pytest.raises(CheckpointError, match=f"{key}: got "):
        read_quantization_config({"quantization_config": quantization})


def test_missing_keys(quantization: dict[str, Any]) -> None:
    for key in [key for key in quantization if key not in ("quant_method", "format_version", "required_features")]:
        broken = {name: value for name, value in quantization.items() if name != key}
        with pytest.raises(CheckpointError, match=f"{key}: got nothing"):
            read_quantization_config({"quantization_config": broken})


def test_features_follow_from_config_and_tensors(quantization: dict[str, Any]) -> None:
    names = {"model.layers.0.mlp.up_proj.weight_int8"}
    assert required_features(quantization, names) == [
        "down-hadamard", "int8-weights", "k-mean", "kv4", "qk-hadamard", "sink-tokens",
    ]  # fmt: skip
    quantization["kv_cache"] = {"bits": 16, "qk_hadamard": False, "k_mean": False, "sink_tokens": 0}
    quantization["transforms"]["down_hadamard"] = 1
    assert required_features(quantization, set()) == []
    quantization["weights"]["group_size"] = 128
    quantization["activations"]["symmetric"] = False
    assert required_features(quantization, {"a.weight_outlier"}) == [
        "asymmetric-activations", "group-scales", "outlier-columns",
    ]  # fmt: skip
