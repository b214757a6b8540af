"""Measure accuracy: every recipe on one model, beside its source, on the same tokens. Writes `results/accuracy-*.json`.

    python benchmarks/accuracy.py smollm2-135m --tokens 32768 --seeds 0 1 2 -o benchmarks/results/accuracy-smollm2.json

One record per recipe, seed, activation mode and KV width (schema: README.md). Records are written after every
checkpoint, and those that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference_ops import window_models
from resident_source import ResidentSource
from torch import Tensor

from w4a4.calibrate.decoder import FloatModel, LayerMath, layer_weights
from w4a4.calibrate.source import Source, open_source
from w4a4.calibrate.statistics import CalibrationRun, CalibrationStats, collect
from w4a4.calibrate.text import calibration_tokens, load_text, token_hash, windows
from w4a4.configs.architecture import ModelConfig
from w4a4.configs.recipe import Recipe, load_recipe
from w4a4.export.balanced_blocks import BalancedBlocks
from w4a4.export.checkpoint import open_checkpoint
from w4a4.export.pipeline import quantize
from w4a4.export.summary import summarize_checkpoint
from w4a4.kernels.layout import ActMode
from w4a4.kernels.reference import block_hadamard, dequantize_kv, quantize_kv, rms_norm
from w4a4.serve.evaluate import Evaluation, LogitsFunction, evaluate_all
from w4a4.serve.model import CausalLM

PATHS: dict[str, tuple[tuple[ActMode, int], ...]] = {
    "dual": (("map", 4), ("a8", 4), ("a16", 16), ("map", 16)),
    "fmpq-int8": (("map", 4), ("map", 16)),
    "fmpq": (("map", 4), ("map", 16)),
    "quik": (("map", 4), ("map", 16)),
    "rtn": (("map", 4), ("map", 16)),
    "w4a16": (("a16", 16), ("a16", 4)),
    "w8a8": (("map", 16), ("map", 4)),
}


class _KV4Math(LayerMath):
    """A float layer whose keys and values are rounded before they are attended to."""

    def __init__(self, config: ModelConfig, layer: int, x: Tensor, k_mean: Tensor, sinks: int) -> None:
        super().__init__(config, layer, x.shape[1], x.device)
        self.k_mean, self.sinks = k_mean, sinks

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = self.config.head_dim
        q, k = block_hadamard(q, size), block_hadamard(k - self.k_mean, size)
        return super().attend(q, self._rounded(k), self._rounded(v))

    def _rounded(self, x: Tensor) -> Tensor:
        out = dequantize_kv(*quantize_kv(x))
        out[:, : self.sinks] = x[:, : self.sinks]
        return out


class FloatKV4:
    """Float weights in `dual`'s basis, K and V rounded to 4 bits as the cache would: what KV4 alone costs."""

    def __init__(self, source: Source, recipe: Recipe, stats: CalibrationStats, device: str) -> None:
        self.config, self.device = source.config, device
        self.sinks = recipe.sink_tokens
        transform = BalancedBlocks(source.config, recipe, stats)
        table = source.tensor("model.embed_tokens.weight")
        head = table if source.config.tie_word_embeddings else source.tensor("lm_head.weight")
        self.embedding = transform.embedding(table).to(device)
        self.head = transform.head(source.tensor("model.norm.weight"), head)[1].to(device)
        self.layers: list[tuple[dict[str, Tensor], Tensor]] = []
        for index in range(source.config.num_layers):
            weights, extra, _ = transform.layer(index, layer_weights(source, index, device))
            self.layers.append((weights, extra["self_attn.k_mean"]))

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens.to(self.device)]
        for index, (weights, k_mean) in enumerate(self.layers):
            x = _KV4Math(self.config, index, x, k_mean, self.sinks).forward(weights, x)
        return rms_norm(x, None, self.config.rms_norm_eps) @ self.head.T


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=list(PATHS))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="recipe overrides; needs --variant")
    parser.add_argument("--variant", default="")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384, help="of the text scored")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--data", default="wikitext2", help="text scored")
    parser.add_argument("--split", default="test", help="of that text; choose on validation, report on test")
    parser.add_argument("--batch", type=int, default=1, help="windows scored at a time")
    parser.add_argument("--device", default="cpu", help="where all of it runs; on a GPU by the reference's operations")
    parser.add_argument("--commit", default="", help="of this repository, where git is not at hand")
    parser.add_argument("--no-kv-alone", action="store_true")
    arguments = parser.parse_args(argv)
    source = open_source(arguments.model)
    if arguments.device != "cpu":
        source = ResidentSource(source, arguments.device)
    text = load_text(arguments.data, arguments.split)
    ids = windows(source.tokenizer(), text, arguments.window, arguments.tokens)
    reference = FloatModel(source, arguments.device)
    record = _Recorder(arguments, source, f"{text.name} {text.split_name}", reference, ids)
    for seed in arguments.seeds:
        stats = _calibrate(source, arguments.samples, arguments.seq, seed, arguments.device)
        for name in arguments.recipes:
            overrides = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in arguments.set)}
            recipe = replace(load_recipe(name, overrides), seed=seed)
            if record.is_missing(name, seed):
                record.packed(source, stats, recipe)
        if not arguments.no_kv_alone and record.is_missing("kv4", seed):
            recipe = replace(load_recipe("dual"), seed=seed)
            record.add(stats, "kv4", {("a16", 4): FloatKV4(source, recipe, stats, arguments.device)}, 16.0, 0.0)


class _Recorder:
    def __init__(
        self,
        arguments: argparse.Namespace,
        source: Source,
        text: str,
        reference: Callable[[Tensor], Tensor],
        ids: Tensor,
    ) -> None:
        self.arguments, self.text, self.reference, self.ids = arguments, text, reference, ids
        self.source = "dequantised GGUF" if source.identity.kind == "gguf" else "float weights"
        self.path: Path = arguments.output
        self.records: list[dict[str, Any]] = []
        if self.path.exists():
            self.records = json.loads(self.path.read_text())["records"]
        self.commit: str = arguments.commit or git_commit()

    def is_missing(self, recipe: str, seed: int) -> bool:
        mine = (self.arguments.model, recipe, self.arguments.variant, self.text, seed)
        return mine not in {
            (r["model"], r["recipe"], r.get("variant", ""), r["text"], r["calibration"]["seed"]) for r in self.records
        }

    def packed(self, source: Source, stats: CalibrationStats, recipe: Recipe) -> None:
        with tempfile.TemporaryDirectory() as folder:
            device = self.arguments.device
            checkpoint = open_checkpoint(quantize(source, stats, recipe, Path(folder) / "packed", device))
            summary = summarize_checkpoint(checkpoint)
            paths = PATHS.get(recipe.name, PATHS["dual"])
            models: dict[tuple[ActMode, int], LogitsFunction] = {}
            if device == "cpu":
                for act, kv in paths:
                    models[act, kv] = partial(CausalLM(checkpoint, device, act, kv).score, chunk=self.arguments.window)
            else:
                models |= window_models(checkpoint, device, paths)
            self.add(stats, recipe.name, models, summary.weight_bits, summary.mac_share_4bit)

    def add(
        self, stats: CalibrationStats, recipe: str, models: dict[tuple[ActMode, int], LogitsFunction],
        weight_bits: float, mac_share: float,
    ) -> None:  # fmt: skip
        named = {f"{act}/{kv}": model for (act, kv), model in models.items()}
        results = evaluate_all(named, self.ids, self.reference, batch=self.arguments.batch)
        for (act, kv), result in zip(models, results.values(), strict=True):
            self.records.append(self._record(stats.run, recipe, act, kv, result, weight_bits, mac_share))
            print(recipe, f"seed {stats.run.seed}", act, f"kv{kv}", f"ppl {result.perplexity:.3f}",
                  f"ratio {result.ratio:.4f}", flush=True)  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"records": self.records}, indent=1) + "\n")

    def _record(
        self, run: CalibrationRun, recipe: str, act: str, kv: int, result: Evaluation, weight_bits: float, share: float
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "model": self.arguments.model,
            "source": self.source,
            "recipe": recipe,
            "act": act,
            "kv": kv,
            "text": self.text,
            "tokens": result.tokens_scored,
            "window": result.window,
            "calibration": {"text": run.text, "samples": run.samples, "seq": run.seq, "seed": run.seed,
                            "token_hash": run.token_sha256},
            "weight_bits": weight_bits,
            "mac_share_4bit": share if act == "map" else 0.0,
            "ppl": result.perplexity,
            "ratio": result.ratio,
            "kl": result.kl,
            "top1": result.top1_agreement,
            "commit": self.commit,
        }  # fmt: skip
        return record | ({"variant": self.arguments.variant} if self.arguments.variant else {})


def git_commit() -> str:
    """The short hash of this repository's commit."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _calibrate(source: Source, samples: int, seq: int, seed: int, device: str) -> CalibrationStats:
    text = load_text("wikitext2", "train")
    tokens = calibration_tokens(source.tokenizer(), text, samples, seq, seed)
    identity = source.identity
    described = f"{text.name} {text.split_name}"
    run = CalibrationRun(identity.name, identity.sha256, described, samples, seq, seed, token_hash(tokens))
    return collect(source, run, tokens, device)


if __name__ == "__main__":
    main()
