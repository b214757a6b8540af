"""One thing wrong with a checkpoint: where it is, what was expected and what stands there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from w4a4.configs.errors import CheckpointError, NumericsError


@dataclass(frozen=True)
class Finding:
    """`file` and `tensor` may be empty where the fault belongs to neither (a folder, a whole file).

    `is_numeric`: the bytes are those that were written, the numbers are NaN or infinite.
    """

    file: str
    tensor: str
    expected: str
    got: str
    is_numeric: bool = False

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.file, self.tensor) if part)
        return f"{place}: got {self.got}, expected {self.expected}"


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise NumericsError or CheckpointError for the first finding; return where there is none."""
    for finding in findings:
        kind = NumericsError if finding.is_numeric else CheckpointError
        raise kind(
            f"corrupt checkpoint: {finding}", "`w4a4 verify DIR` lists every fault; fetch or write the checkpoint again"
        )
