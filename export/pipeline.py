"""`w4a4 quantize`: a source, its statistics and a recipe in; a packed checkpoint out.

Layer by layer: transform, quantise on the inputs that the quantised layers before it produce, write, commit. The
residual stream is committed with every layer, so that a run that was killed goes on at the first unfinished layer
and gives the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.calibrate.decoder import LayerMath, layer_weights, lm_head_weight
from w4a4.calibrate.source import Source
from w4a4.calibrate.statistics import CalibrationStats
from w4a4.configs.errors import StoppedError, UsageError
from w4a4.configs.recipe import Recipe
from w4a4.export.balanced_blocks import BalancedBlocks
from w4a4.export.checkpoint import FORMAT_VERSION, open_checkpoint
from w4a4.export.layer_quantizer import STAGES, quantize_layer
from w4a4.export.model_card import model_card
from w4a4.export.plan import LayerPlan, fit_recipe
from w4a4.export.promotion import block_widths
from w4a4.export.published import IdentityTransform
from w4a4.export.summary import summarize_checkpoint
from w4a4.export.writer import CheckpointWriter

logger = logging.getLogger(__name__)

PROBE_SEQUENCES = 2
PROBE_LENGTH = 1024
TABLE_ROWS = 8192  # of an embedding transformed at a time


@dataclass(frozen=True)
class LayerReport:
    """One finished layer: its index of `num_layers`, relative squared output error per linear, promoted linears."""

    layer: int
    num_layers: int
    errors: dict[str, float]
    promoted: tuple[str, ...]


def _ignore(_report: LayerReport) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """How a run speaks to whoever started it.

    on_layer: called after each commit. should_stop: polled before and after each layer. quality: measures the assembled
    checkpoint folder before it is published; what it returns goes into manifest and model card, and what it raises
    keeps the checkpoint from being published.
    """

    on_layer: Callable[[LayerReport], None] = _ignore
    should_stop: Callable[[], bool] = lambda: False
    quality: Callable[[Path], dict[str, Any]] | None = None


def quantize(
    source: Source,
    stats: CalibrationStats,
    recipe: Recipe,
    output: Path,
    device: torch.device | str = "cpu",
    callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
) -> Path:
    """Write the packed checkpoint of `source` to `output` and return that path.

    Raises:
        UsageError: statistics of another model; an output that exists or belongs to another run.
        UnsupportedError: sizes that a packed model cannot run with.
        StoppedError: `should_stop` said so; the same call resumes.
        NumericsError, ResourceError: see the parts.
    """
    recipe = fit_recipe(recipe, source.config)
    _check_statistics(source, stats)
    identity = {
        "w4a4": version("w4a4"),
        "torch": torch.__version__,
        "source": {"kind": source.identity.kind, "sha256": source.identity.sha256,
                   "revision": source.identity.revision},
        "recipe": asdict(recipe),
        "calibration": asdict(stats.run),
    }  # fmt: skip
    with CheckpointWriter(output, identity, source.identity.path) as writer:
        writer.open()
        run = _Run(source, stats, recipe, device, callbacks)
        run.layers(writer)
        run.rest(writer)
        folder = writer.assemble(run.hf_config(), run.quantization_config(), recipe.to_yaml(), source.side_files)
        quality = callbacks.quality(folder) if callbacks.quality else None
        summary = summarize_checkpoint(open_checkpoint(folder)).to_json()
        identity_of_source = asdict(source.identity)
        del identity_of_source["path"]
        name, calibration = _without_folder(source.identity.name), asdict(stats.run)
        extras = {
            "source": identity_of_source | {"name": name},
            "calibration": calibration | {"model": _without_folder(stats.run.model)},
            "quality": {"evaluation": quality, "layer_errors": run.layer_errors()},
        }
        return writer.publish(extras, model_card(name, recipe, calibration, summary, quality))


def _without_folder(name: str) -> str:
    """A model's name for others: of a path the last part, for a checkpoint tells nothing of the machine it is from."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else name


def _check_statistics(source: Source, stats: CalibrationStats) -> None:
    if stats.run.model_sha256 != source.identity.sha256:
        raise UsageError(
            f"the statistics are of {stats.run.model} (sha256 {stats.run.model_sha256}), "
            f"not of {source.identity.name} (sha256 {source.identity.sha256})",
            "calibrate this model, or leave out --stats",
        )


class _Run:
    """The parts of one run and what they share."""

    def __init__(self, source: Source, stats: CalibrationStats, recipe: Recipe, device: torch.device | str,
                 callbacks: Callbacks) -> None:  # fmt: skip
        self.source, self.stats, self.recipe, self.device, self.callbacks = source, stats, recipe, device, callbacks
        self.config = source.config
        self.linear_names = list(self.config.linear_shapes())
        self.errors = torch.zeros(self.config.num_layers, len(self.linear_names))

    @cached_property
    def transform(self) -> BalancedBlocks | IdentityTransform:
        kind = BalancedBlocks if self.recipe.method == "balanced_blocks" else IdentityTransform
        return kind(self.config, self.recipe, self.stats)

    @torch.inference_mode()
    def layers(self, writer: CheckpointWriter) -> None:
        """Quantise and commit every layer that is not yet done."""
        state = writer.load_state("run")
        if state is None:
            promoted = self._promotions()
            hidden = self._embedded(self.stats.tokens)
        else:
            promoted, hidden, self.errors = state["promoted"], state["hidden"].to(self.device), state["errors"]
        for layer in range(writer.num_layers_done, self.config.num_layers):
            self._stop_if_asked(layer)
            self._layer(writer, layer, hidden, promoted)

    def _layer(self, writer: CheckpointWriter, layer: int, hidden: Tensor, promoted: Tensor) -> None:
        """Quantise and commit one layer; `hidden` goes through it in place."""
        weights, extra, plan = self.transform.layer(layer, layer_weights(self.source, layer, self.device))
        widths = {name: width for stage, width in zip(STAGES, promoted[layer].tolist(), strict=True) for name in stage}
        plan = {
            name: part.promoted(widths[name], self.recipe.high_weight_bits) if widths[name] else part
            for name, part in plan.items()
        }
        names = tuple(name for name, part in plan.items() if widths[name] == part.layout.in_features)
        math = LayerMath(self.config, layer, hidden.shape[1], self.device)
        result = quantize_layer(math, weights, plan, hidden, self.recipe, self.device)
        if result.damping > self.recipe.damping:
            logger.warning("layer %d: a Hessian could only be factored with damping %g", layer, result.damping)
        self.errors[layer] = torch.tensor([result.errors[name] for name in self.linear_names])
        kept = {name: value for name, value in weights.items() if "norm" in name} | extra
        prefix = f"model.layers.{layer}."
        writer.save_state("run", {"promoted": promoted, "hidden": hidden, "errors": self.errors})
        writer.write_layer(
            layer,
            {prefix + name: linear for name, linear in result.linears.items()},
            {prefix + name: value.cpu().contiguous() for name, value in kept.items()},
        )
        self.callbacks.on_layer(LayerReport(layer, self.config.num_layers, result.errors, names))

    def _stop_if_asked(self, num_done: int) -> None:
        if self.callbacks.should_stop():
            raise StoppedError(
                f"stopped after {num_done} of {self.config.num_layers} layers; they are kept",
                "run the same command again to go on",
            )

    @torch.inference_mode()
    def rest(self, writer: CheckpointWriter) -> None:
        """Embedding, final norm and lm_head, in bf16 but for the norm."""
        if writer.is_rest_done:
            return
        gain = self.source.tensor("model.norm.weight")
        rest = {"model.embed_tokens.weight": _packed_table(self._embedding(), self.transform.embedding)}
        if not self._stays_tied():
            head = lm_head_weight(self.source)
            rest["lm_head.weight"] = _packed_table(head, lambda rows: self.transform.head(gain, rows)[1])
        rest["model.norm.weight"] = self.transform.head(gain, gain[None])[0]
        writer.write_rest(rest)

    def hf_config(self) -> dict[str, Any]:
        return {**self.source.hf_config, "tie_word_embeddings": self._stays_tied()}

    def quantization_config(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "quant_method": "w4a4",
            "format_version": FORMAT_VERSION,
            "required_features": [],
            "producer": {"name": "w4a4", "version": version("w4a4")},
            "recipe": recipe.name,
            "block_size": 128,
            "weights": {"bits": recipe.weight_bits, "group_size": recipe.group_size, "symmetric": True},
            "activations": {"bits": recipe.act_bits, "symmetric": recipe.act_symmetric, "default_act": "map"},
            "kv_cache": {
                "bits": recipe.kv_bits,
                "qk_hadamard": recipe.kv_hadamard,
                "k_mean": recipe.kv_mean,
                "sink_tokens": recipe.sink_tokens,
            },
            "transforms": {"down_hadamard": recipe.down_hadamard},
            "permutation": {"tp_max": recipe.tp_max},
            "modules_to_not_convert": ["lm_head"],
        }

    def layer_errors(self) -> Mapping[str, list[float]]:
        """Relative squared output error of every linear, by short name, one per layer."""
        columns = self.errors.T.tolist()
        return {name: [round(value, 6) for value in column]
                for name, column in zip(self.linear_names, columns, strict=True)}  # fmt: skip

    def _stays_tied(self) -> bool:
        """A residual basis folds the final norm into lm_head, which the embedding does not share."""
        return self.config.tie_word_embeddings and not self.recipe.residual_basis

    def _embedding(self) -> Tensor:
        return self.source.tensor("model.embed_tokens.weight")

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream f32 [B, T, H] at the first layer, transformed, on the device."""
        return self.transform.embedding(self._embedding()[tokens.long()]).to(self.device)

    def _promotions(self) -> Tensor:
        """int64 [layers, stages]: how many of a stage's channels, the last ones, run at 8 bits; 0: as its plan says."""
        if self.recipe.method != "balanced_blocks" or self.recipe.budget == 0:
            return torch.zeros(self.config.num_layers, len(STAGES), dtype=torch.int64)

        def prepared(layer: int) -> tuple[dict[str, Tensor], LayerPlan]:
            self._stop_if_asked(0)
            weights, _, plan = self.transform.layer(layer, layer_weights(self.source, layer, self.device))
            return weights, plan

        logger.info("measuring which layers need 8 bits most")
        hidden = self._embedded(self.stats.tokens[:PROBE_SEQUENCES, :PROBE_LENGTH])
        return block_widths(self.config, self.recipe, prepared, hidden, self.device)


def _packed_table(table: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """`transform` of the rows of `table` [V, H] in bf16, a few at a time: both float forms never stand side by side."""
    packed = torch.empty(table.shape, dtype=torch.bfloat16)
    for rows, out in zip(torch.split(table, TABLE_ROWS), torch.split(packed, TABLE_ROWS), strict=True):
        out.copy_(transform(rows))
    return packed
