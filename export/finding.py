"""One thing wrong with a checkpoint: where it is, what was expected and what stands there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from w4a4.configs.errors import CheckpointError


@dataclass(frozen=True)
class Finding:
    """`file` and `tensor` may be empty where the fault belongs to neither (a folder, a whole file)."""

    file: str
    tensor: str
    expected: str
    got: str

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.file, self.tensor) if part)
        return f"{place}: got {self.got}, expected {self.expected}"


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise CheckpointError for the first finding; return where there is none."""
    for finding in findings:
        raise CheckpointError(
            f"corrupt checkpoint: {finding}", "`w4a4 verify DIR` lists every fault; fetch or write the checkpoint again"
        )
