"""A model to be calibrated, quantised or compared with: its float weights by Hugging Face names, read one at a time.

Three kinds exist: a folder of safetensors (a hub snapshot is one), and a GGUF file. Nothing here keeps a weight: every
`tensor` call reads, converts and forgets, so a model larger than memory can be walked layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from w4a4.calibrate.fetch import Location, locate
from w4a4.configs.architecture import SUPPORTED_TEXT, ModelConfig, quantization_method
from w4a4.configs.errors import CheckpointError, NumericsError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SourceKind = Literal["hub", "folder", "gguf"]


@dataclass(frozen=True)
class SourceIdentity:
    """Which weights these are, for manifests and for refusing to resume with others."""

    name: str  # as the user typed it
    kind: SourceKind
    path: Path
    revision: str | None  # hub commit
    sha256: str | None  # of the GGUF file's first part, else of config.json and a piece of every tensor


class Source(Protocol):
    """Float weights by Hugging Face names ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight", ...)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def hf_config(self) -> dict[str, Any]:
        """`config.json` as Hugging Face would have it."""

    @property
    def identity(self) -> SourceIdentity: ...

    @property
    def side_files(self) -> tuple[Path, ...]:
        """Tokenizer, chat template, generation config and the like: copied unchanged into a checkpoint."""

    def names(self) -> frozenset[str]:
        """Every tensor of the model; `lm_head.weight` is not among them when it is tied."""

    def tensor(self, name: str) -> Tensor:
        """That tensor as float32 on the CPU, freshly read and the caller's own.

        A tied `lm_head.weight` gives the embedding.

        Raises:
            CheckpointError: no such tensor, or the file is damaged.
            NumericsError: it holds NaN or infinite values.
        """

    def tokenizer(self) -> PreTrainedTokenizerBase: ...


def open_source(name: str, *, offline: bool = False, revision: str | None = None) -> Source:
    """Open a model by alias, hub id ("org/name" or "org/name@revision"), folder or .gguf file.

    The architecture is checked from `config.json` (or the GGUF header) before any weight is fetched or read.

    Raises:
        NotFoundError: nothing there, gated, or offline and not cached.
        UnsupportedError: an architecture, precision or file form that is not supported.
        CheckpointError: files that are damaged, incomplete or not to be trusted.
    """
    from w4a4.calibrate.gguf_source import GGUFSource
    from w4a4.calibrate.safetensors_source import SafetensorsSource

    location: Location = locate(name, offline=offline, revision=revision)
    if location.kind == "gguf":
        return GGUFSource(location.path, name=name)
    return SafetensorsSource(location.path, name=name, kind=location.kind, revision=location.revision)


def check_source_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The shape of a source, refusing our own packed checkpoints as well: they have no float weights."""
    if quantization_method(hf_config) == "w4a4":
        raise UnsupportedError(
            "this is a checkpoint that w4a4 has packed already", "name the original model with float weights"
        )
    return ModelConfig.from_hf(hf_config)


def check_tensor_names(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Compare the tensors `found` (name -> shape) in `where` with what `config` asks for.

    Buffers that transformers 4 used to save (`rotary_emb.inv_freq`) and a saved copy of a tied `lm_head.weight` are
    let pass.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or belongs to no part of this architecture.
    """
    expected = config.tensor_shapes()
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{where}: tensor {missing[0]}{more} missing", "the model is incomplete or of another kind: fetch it again"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    known_copies = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in found:
        if name not in expected and name not in known_copies and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{where}: tensor {name} is not part of a {config.architecture} model", f"supported: {SUPPORTED_TEXT}"
            )


def checked_finite(tensor: Tensor, name: str, where: str) -> Tensor:
    """`tensor` itself, or NumericsError when it holds NaN or an infinity."""
    if tensor.numel():
        low, high = tensor.aminmax()  # NaN propagates into both; no mask of the tensor's size is made
        if not bool((low.isfinite() & high.isfinite()).item()):
            raise NumericsError(
                f"{where}: tensor {name} holds values that are not finite",
                "the source model is damaged: fetch it again",
            )
    return tensor
