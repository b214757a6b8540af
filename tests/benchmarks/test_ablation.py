import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from w4a4.configs.recipe import load_recipe
from w4a4.export import balanced_blocks
from w4a4.export.transforms.residual_basis import residual_basis


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
        seen.add((recipe, variant.has_random_basis, variant.mixed_axes, variant.calibration))
        assert (recipe == shipped) == (not variant.changes), name
    assert len(seen) == len(ablation.VARIANTS)


def test_what_has_no_key_is_replaced_and_put_back(ablation: ModuleType) -> None:
    energies = torch.diag(torch.arange(1.0, 193))

    def moment_under(name: str) -> torch.Tensor:
        with ablation._replaced(ablation.VARIANTS[name]):
            basis = balanced_blocks.residual_basis(energies, 0)
        torch.testing.assert_close(basis.T @ basis, torch.eye(192), atol=1e-5, rtol=0)
        return basis.T @ energies @ basis

    def last_third(moment: torch.Tensor) -> float:
        return float(moment.diagonal()[-64:].sum() / energies.trace())

    assert last_third(moment_under("as shipped")) == pytest.approx(10272 / 18528, rel=1e-3)  # 129 to 192 of 1 to 192
    random = moment_under("random basis instead of principal axes")
    assert last_third(random) == pytest.approx(1 / 3, abs=0.05)
    torch.testing.assert_close(moment_under("principal axes not mixed"), energies, atol=1e-3, rtol=0)
    assert balanced_blocks.residual_basis is residual_basis
