"""A known model as a source without weights: what a dry run needs of a model whose files are not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4a4.calibrate.source import Source, SourceIdentity, open_source
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import NotFoundError
from w4a4.configs.shapes import known_shapes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ShapeSource:
    """See `calibrate.source.Source`; whatever would read a file raises the error that says why there is none."""

    identity: SourceIdentity
    config: ModelConfig
    hf_config: dict[str, Any]
    missing: NotFoundError
    side_files: tuple[Path, ...] = ()

    def names(self) -> frozenset[str]:
        return frozenset(self.config.tensor_shapes())

    def tensor(self, name: str) -> Tensor:
        raise self.missing

    def tokenizer(self) -> PreTrainedTokenizerBase:
        raise self.missing


def open_shape(name: str, *, offline: bool = False, revision: str | None = None) -> Source:
    """`open_source`, or the shape that an alias stands for where its files cannot be had.

    Raises:
        As `open_source`.
    """
    try:
        return open_source(name, offline=offline, revision=revision)
    except NotFoundError as error:
        fields = known_shapes().get(name)
        if fields is None:
            raise
        identity = SourceIdentity(name, "hub", Path(name), revision, None)
        return ShapeSource(identity, ModelConfig.from_hf(fields), fields, error)
