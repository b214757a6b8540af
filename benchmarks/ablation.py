"""The ablation of `dual`: the recipe with one change at a time. Writes records with a `variant` (schema: README.md).

    python benchmarks/ablation.py smollm2-135m -o benchmarks/results/accuracy-ablation-smollm2-135m.json

Every variant is scored on the validation split, where the recipe's own choices were made. What a recipe has no key for
is replaced in the running program. Variants that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accuracy
import torch
from torch import Tensor

from w4a4.export import balanced_blocks
from w4a4.export.transforms.residual_basis import MIXED_AXES, residual_basis

UNPREPARED_KEYS = {"key_scaling": False, "kv_mean": False, "kv_hadamard": False, "sink_tokens": 0}


@dataclass(frozen=True)
class Variant:
    """changes: keys of the recipe. has_random_basis, mixed_axes: what has none. calibration: times the usual tokens."""

    changes: dict[str, Any] = field(default_factory=dict)
    has_random_basis: bool = False
    mixed_axes: int = MIXED_AXES
    calibration: int = 1


VARIANTS = {
    "as shipped": Variant(),
    "random basis instead of principal axes": Variant(has_random_basis=True),
    "principal axes not mixed": Variant(mixed_axes=1),
    "channels not balanced": Variant({"channel_balance": False}),
    "int4 weights under 8-bit activations": Variant({"high_weight_bits": 4}),
    "rounding to nearest instead of GPTQ": Variant({"rounding": "rtn"}),
    "absmax scales of activations": Variant({"clip_search": False}),
    "absmax scales of weights": Variant({"scale_search": False}),
    "keys as they come": Variant(UNPREPARED_KEYS),
    "no Hadamard of values": Variant({"value_hadamard": False}),
    "no Hadamard before down_proj": Variant({"down_hadamard": 1}),
    "nothing at 8 bits": Variant({"budget": 0.0}),
    "10 % at 8 bits": Variant({"budget": 0.1}),
    "30 % at 8 bits": Variant({"budget": 0.3}),
    "4 times the calibration": Variant(calibration=4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192, help="of the validation text scored")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="of this repository, where git is not at hand")
    arguments = parser.parse_args()
    accuracy.PATHS["dual"] = (("map", 4),)
    for name in arguments.variants:
        variant = VARIANTS[name]
        common = ["--recipes", "dual", "--split", "validation", "--no-kv-alone", "--variant", name]
        common += ["-o", str(arguments.output), "--device", arguments.device, "--commit", arguments.commit]
        common += ["--samples", str(arguments.samples * variant.calibration), "--seq", str(arguments.seq)]
        changes = [f"{key}={json.dumps(value)}" for key, value in variant.changes.items()]
        print(name, flush=True)
        with _replaced(variant):
            accuracy.main([arguments.model, "--tokens", str(arguments.tokens), *common, "--set", *changes])


@contextmanager
def _replaced(variant: Variant) -> Iterator[None]:
    basis = _random_basis if variant.has_random_basis else residual_basis
    balanced_blocks.residual_basis = partial(basis, mixed=variant.mixed_axes)
    try:
        yield
    finally:
        balanced_blocks.residual_basis = residual_basis


def _random_basis(second_moment: Tensor, seed: int, mixed: int) -> Tensor:
    """As `residual_basis`, of a symmetric Gaussian matrix, whose eigenvectors know no direction."""
    gaussian = torch.randn(second_moment.shape, generator=torch.Generator().manual_seed(seed))
    return residual_basis(gaussian + gaussian.T, seed, mixed)


if __name__ == "__main__":
    main()
