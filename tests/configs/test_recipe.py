from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from w4a4.configs.errors import UsageError
from w4a4.configs.recipe import METHODS, Recipe, load_recipe, recipe_names


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf8")
    return str(path)


def test_the_shipped_recipes() -> None:
    assert recipe_names() == ["dual", "fmpq", "fmpq-int8", "quik", "rtn", "w4a16", "w8a8"]
    recipes = {name: load_recipe(name) for name in recipe_names()}
    assert all(recipe.name == name and recipe.summary for name, recipe in recipes.items())
    assert {recipe.method for recipe in recipes.values()} == set(METHODS)
    dual = recipes["dual"]
    assert (dual.method, dual.kv_bits, dual.budget, dual.high_weight_bits) == ("balanced_blocks", 4, 0.2, 8)
    fmpq = recipes["fmpq-int8"]
    assert replace(dual, name=fmpq.name, summary=fmpq.summary, residual_basis=False) == fmpq
    assert (recipes["fmpq"].high_weight_bits, recipes["fmpq-int8"].high_weight_bits) == (4, 8)
    quik = recipes["quik"]
    assert (quik.outlier_share * 4096, quik.down_bits, quik.act_symmetric) == (256, 8, False)
    assert (recipes["rtn"].rounding, recipes["rtn"].scale_search) == ("rtn", False)
    assert (recipes["w4a16"].act_bits, recipes["w8a8"].weight_bits, recipes["w8a8"].kv_bits) == (16, 8, 16)


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_saved_loads_again(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, {"seed": 7})
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe
    assert list(yaml.safe_load(recipe.to_yaml())) == [field.name for field in fields(Recipe)]


def test_a_file_overrides_its_base_and_a_flag_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "base: dual\nbudget: 0.1\nseed: 3\n")
    recipe, dual = load_recipe(path, {"seed": 4}), load_recipe("dual")
    assert (recipe.name, recipe.budget, recipe.seed) == ("mine", 0.1, 4)
    changed = {f.name for f in fields(Recipe) if getattr(recipe, f.name) != getattr(dual, f.name)}
    assert changed == {"name", "budget", "seed"}


def test_a_whole_number_is_a_share() -> None:
    assert load_recipe("dual", {"budget": 1}).budget == 1.0
    assert type(load_recipe("dual", {"budget": 1}).budget) is float


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("base: dual\nbudgets: 0.1\n", "unknown key 'budgets'; did you mean budget", "valid keys: name"),
        ("base: dual\nzzz: 1\n", "unknown key 'zzz'$", "valid keys: name"),
        ("base: dual\n1: 1\n", "unknown key 1", "valid keys: name"),
        ("base: dual\nseed: one\n", "seed must be int, got 'one'", ""),
        ("base: dual\nseed: 1.5\n", "seed must be int, got 1.5", ""),
        ("base: dual\nseed: true\n", "seed must be int, got True", ""),
        ("base: dual\nkv_mean: 1\n", "kv_mean must be bool, got 1", ""),
        ("base: dual\ndamping: null\n", "damping must be float, got None", ""),
        ("base: dule\n", "base must be a shipped recipe, got 'dule'", "fmpq-int8"),
        ("base: [dual]\n", "base must be a shipped recipe", "fmpq-int8"),
        ("name: x\nmethod: balanced_blocks\n", "missing summary", "base:"),
        ("- dual\n", "must be a mapping of keys, got list", ""),
        ("", "must be a mapping of keys, got NoneType", ""),
        ("a: [\n", "not valid YAML", ""),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML", ""),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert hint in caught.value.hint


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_bytes(b"name: \x80\n")
    with pytest.raises(UsageError, match="not valid YAML"):
        load_recipe(str(path))


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recipe named 'fmqp'; did you mean fmpq") as caught:
        load_recipe("fmqp")
    assert "dual, fmpq, fmpq-int8, quik, rtn, w4a16, w8a8" in caught.value.hint
    with pytest.raises(UsageError, match="does not exist"):
        load_recipe(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("rtn", {"method": "duel"}, "method is 'duel', must be one of uniform"),
        ("rtn", {"rounding": "up"}, "rounding is 'up'"),
        ("rtn", {"weight_bits": 3}, "weight_bits is 3, must be one of 4, 8"),
        ("rtn", {"act_bits": 6}, "act_bits is 6"),
        ("dual", {"kv_bits": 8}, "kv_bits is 8"),
        ("dual", {"sink_tokens": 3}, "sink_tokens is 3"),
        ("dual", {"down_hadamard": 96}, "down_hadamard is 96"),
        ("dual", {"budget": 1.5}, r"budget must lie in \[0, 1\], got 1.5"),
        ("quik", {"outlier_share": -0.1}, r"outlier_share must lie in \[0, 1\]"),
        ("dual", {"budget": float("nan")}, r"budget must lie in \[0, 1\], got nan"),
        ("dual", {"damping": 0.0}, "damping must be above 0 and finite, got 0.0"),
        ("dual", {"damping": float("nan")}, "damping must be above 0 and finite, got nan"),
        ("dual", {"damping": float("inf")}, "damping must be above 0 and finite, got inf"),
        ("rtn", {"weight_bits": 8}, "4-bit activations need 4-bit weights"),
        ("dual", {"act_bits": 8}, "method balanced_blocks starts from 4-bit weights and activations, got 4 and 8"),
        ("quik", {"weight_bits": 8, "act_bits": 8}, "method outlier_columns starts from 4-bit"),
        ("rtn", {"group_size": 64}, "group_size 64 needs 16-bit activations"),
        ("w4a16", {"group_size": 12}, "group_size must be a multiple of 8, got 12"),
        ("w4a16", {"group_size": -64}, "group_size must be a multiple of 8, got -64"),
        ("w4a16", {"down_bits": 8}, "group_size 64 needs 16-bit activations in every linear"),
        ("rtn", {"down_hadamard": 128}, "method uniform does not read down_hadamard"),
        ("fmpq", {"residual_basis": True}, "method magnitude_blocks does not read residual_basis"),
        ("fmpq", {"kv_mean": True}, "method magnitude_blocks does not read kv_mean"),
        ("quik", {"budget": 0.1}, "method outlier_columns does not read budget"),
        ("dual", {"outlier_share": 0.1}, "method balanced_blocks does not read outlier_share"),
        ("dual", {"down_bits": 8}, "method balanced_blocks does not read down_bits"),
    ],
)
def test_what_cannot_be_is_refused(base: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(base, change)
