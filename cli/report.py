"""The report that `calibrate` and `quantize` leave for people: what is drawn, and the words around it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from w4a4.calibrate.report import PointProfile
    from w4a4.calibrate.source import Source
    from w4a4.calibrate.statistics import CalibrationRun, CalibrationStats
    from w4a4.export.checkpoint import PackedCheckpoint

READERS = {
    "attn_in": "self_attn.q_proj",
    "attn_out": "self_attn.o_proj",
    "mlp_in": "mlp.gate_proj",
    "mlp_hidden": "mlp.down_proj",
}
"""One linear that reads each point; the others there share its order and map."""


def write_calibration_report(source: Source, stats: CalibrationStats, folder: Path) -> Path:
    """report.html and its pictures in `folder`: channel magnitudes, and the map that FMPQ would choose."""
    from w4a4.calibrate.report import ReportData, write_report

    notes = (*_fmpq_notes(), "Layer errors are known after `w4a4 quantize`, whose report shows them.")
    data = ReportData(
        stats.run.model, _fmpq_profiles(source.config, stats), facts=_facts(source, stats.run), notes=notes
    )
    return write_report(data, folder)


def write_quantization_report(
    source: Source, stats: CalibrationStats, recipe: Recipe, path: Path, folder: Path
) -> Path:
    """report.html and its pictures in `folder`: also what `recipe` chose for the checkpoint `path`, and its errors."""
    from w4a4.calibrate.report import LinearError, ReportData, write_report
    from w4a4.export.checkpoint import open_checkpoint
    from w4a4.export.manifest import read_manifest
    from w4a4.export.summary import summarize_checkpoint

    checkpoint = open_checkpoint(path)
    summary = summarize_checkpoint(checkpoint)
    layer_errors = read_manifest(path)["quality"]["layer_errors"]
    errors = tuple(
        LinearError(layer, name, value) for name, values in layer_errors.items() for layer, value in enumerate(values)
    )
    facts = _facts(source, stats.run) | {
        "Recipe": f"{recipe.name}: {recipe.summary}",
        "Weights": f"{summary.weight_bits:.2f} bits, {summary.stored_bits:.2f} with scales and maps",
        "Activations": f"{summary.act_bits:.2f} bits on average; {summary.mac_share_4bit:.1%} of products 4 x 4 bits",
        "KV cache": f"{summary.kv_bits} bits",
    }
    if recipe.residual_basis:
        profiles = _fmpq_profiles(source.config, stats)
        notes: tuple[str, ...] = (
            "This recipe rotates its inputs, which leaves no outlier channels to sort: for comparison, the pictures of "
            "magnitude and map show what FMPQ would do. The errors are the checkpoint's.",
            *_fmpq_notes(),
        )
    else:
        profiles = _chosen_profiles(checkpoint, stats)
        notes = ("Order and precision map are the checkpoint's.",)
    return write_report(ReportData(stats.run.model, profiles, errors, facts, notes), folder)


def _facts(source: Source, run: CalibrationRun) -> dict[str, str]:
    config = source.config
    return {
        "Model": f"{run.model} ({source.identity.kind}), {config.architecture}, {config.num_layers} layers",
        "Calibration text": run.text,
        "Tokens": f"{run.samples} windows of {run.seq}, seed {run.seed}",
        "Hash of the tokens": run.token_sha256,
    }


def _fmpq_profiles(config: ModelConfig, stats: CalibrationStats) -> tuple[PointProfile, ...]:
    from w4a4.calibrate.profiles import magnitude_profiles
    from w4a4.export.published import OUTLIER_THRESHOLD

    return magnitude_profiles(stats, config.num_layers, load_recipe("fmpq").budget, OUTLIER_THRESHOLD)


def _fmpq_notes() -> tuple[str, ...]:
    from w4a4.export.published import OUTLIER_THRESHOLD

    budget = load_recipe("fmpq").budget
    return (
        f"An outlier is a channel whose largest magnitude exceeds {OUTLIER_THRESHOLD:g} times the median channel's.",
        f"FMPQ's precision map: blocks with outliers at 8 bits, at most {budget:.0%} of each input's blocks.",
    )


def _chosen_profiles(checkpoint: PackedCheckpoint, stats: CalibrationStats) -> tuple[PointProfile, ...]:
    """Order and map that the checkpoint stores, point by point."""
    import torch

    from w4a4.calibrate.report import PointProfile

    profiles = []
    for layer in range(checkpoint.config.num_layers):
        for point, linear in READERS.items():
            prefix = f"model.layers.{layer}.{linear}"
            magnitude = stats.channel(layer, point, "absmax")
            order = torch.arange(magnitude.numel())
            if f"{prefix}.input_perm" in checkpoint.entries:
                order = checkpoint.tensor(f"{prefix}.input_perm").long()
            bits = checkpoint.tensor(f"{prefix}.block_precision").to(torch.int64)
            profiles.append(PointProfile(layer, point, magnitude, order, bits))
    return tuple(profiles)
