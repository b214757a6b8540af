import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from w4a4.configs.recipe import load_recipe
from w4a4.export import dual


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("ablation")
    finally:
        sys.path.remove(folder)


def test_every_variant_differs_from_the_recipe_and_can_be_run(ablation: ModuleType) -> None:
    shipped = load_recipe("dual")
    seen = set()
    for name, variant in ablation.VARIANTS.items():
        recipe = load_recipe("dual", variant.changes)
        seen.add((recipe, variant.has_random_basis, variant.block, variant.calibration))
        assert (recipe == shipped) == (not variant.changes), name
    assert len(seen) == len(ablation.VARIANTS)


def test_what_has_no_key_is_replaced_and_put_back(ablation: ModuleType) -> None:
    before = dual.residual_basis, dual.high_width
    energies = torch.diag(torch.arange(1.0, 193))
    with ablation._replaced(ablation.VARIANTS["random basis instead of principal axes"]):
        basis = dual.residual_basis(energies, 64, 0)
    torch.testing.assert_close(basis.T @ basis, torch.eye(192), atol=1e-5, rtol=0)
    share = float((basis.T @ energies @ basis).diagonal()[-64:].sum() / energies.trace())
    assert share == pytest.approx(1 / 3, abs=0.05)  # the last third of the coordinates holds a third, not most of it
    with ablation._replaced(ablation.VARIANTS["10 % at 8 bits"]):
        assert dual.high_width(576, 0.1) == 64 and dual.high_width(576, 0.1, 128) == 64
    assert (dual.residual_basis, dual.high_width) == before
    assert dual.high_width(576, 0.1) == 128
