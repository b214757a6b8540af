"""What calibration learns about a model, and the folder it is kept in.

One pass over the calibration tokens, layer by layer (`decoder.run_layers`). The folder holds `statistics.json`
(what was run) and `statistics.safetensors` (the numbers and the tokens, which GPTQ runs again). No pickle.

Per layer and point (`attn_in`, `attn_out`, `mlp_in`, `mlp_hidden`) and channel:
    absmax          f32 [K]     largest magnitude
    capped_energy   f32 [K]     E[w x²], w = min(1, 20 median‖x‖² / ‖x‖²): tokens of massive norm count less
and, per layer, over positions after the first SINK_TOKENS:
    key_mean, value_mean f32 [kv_heads, D]; key_variance f32 [kv_heads, D]; query_mean_square f32 [heads, D]
and once: residual_covariance f32 [H, H], the sum over all norms of E[x xᵀ], x the normed stream before its gain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from w4a4.calibrate.decoder import Observe, run_layers
from w4a4.calibrate.source import Source
from w4a4.configs.errors import CheckpointError, NotFoundError, NumericsError, UsageError

SCHEMA = 1
SINK_TOKENS = 4
POINTS = ("attn_in", "attn_out", "mlp_in", "mlp_hidden")


@dataclass(frozen=True)
class CalibrationRun:
    """What was run: enough to say whether two statistics are of the same thing."""

    model: str
    model_sha256: str | None
    text: str
    samples: int
    seq: int
    seed: int
    token_sha256: str


@dataclass(frozen=True)
class CalibrationStats:
    run: CalibrationRun
    tokens: Tensor  # int32 [samples, seq]
    tensors: dict[str, Tensor]  # by the names in the module's docstring, "layers.{i}.{point}.absmax"

    def channel(self, layer: int, point: str, statistic: str) -> Tensor:
        return self.tensors[f"layers.{layer}.{point}.{statistic}"]

    def head(self, layer: int, statistic: str) -> Tensor:
        return self.tensors[f"layers.{layer}.{statistic}"]

    @property
    def residual_covariance(self) -> Tensor:
        return self.tensors["residual_covariance"]


def token_weights(x: Tensor) -> Tensor:
    """min(1, 20 median‖x‖² / ‖x‖²) for tokens x [T, K] -> [T]: massive tokens do not drown the rest."""
    return token_weights_by_sequence(x[None])[0]


def token_weights_by_sequence(x: Tensor) -> Tensor:
    """`token_weights` within each sequence of x [B, T, K] -> [B, T]."""
    energy = x.float().pow(2).sum(-1)
    return (20 * energy.median(-1, keepdim=True).values / energy.clamp_min(1e-30)).clamp_max(1)


class _LayerObserver:
    """Accumulates one layer's statistics; `finish` turns sums into means."""

    def __init__(self, covariance: Tensor) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.covariance = covariance

    def __call__(self, point: str, x: Tensor) -> None:
        if point in ("attn_norm", "mlp_norm"):
            for sequence, weights in zip(x, token_weights_by_sequence(x), strict=True):
                kept = sequence[weights == 1]
                self.covariance += (kept.T @ kept / max(kept.shape[0], 1)).to(self.covariance)
        elif point in POINTS:
            weights = token_weights_by_sequence(x).flatten().unsqueeze(-1)
            flat = x.flatten(0, -2).float()
            absmax = flat.abs().amax(0)
            name = f"{point}.absmax"
            self.sums[name] = torch.maximum(self.sums[name], absmax) if name in self.sums else absmax
            self._add(f"{point}.capped_energy", (flat.square() * weights).sum(0), flat.shape[0])
        else:
            kept = x[:, SINK_TOKENS:].flatten(0, 1).float()
            if point == "query":
                self._add("query_mean_square", kept.square().sum(0), kept.shape[0])
            else:
                self._add(f"{point}_mean", kept.sum(0), kept.shape[0])
                if point == "key":
                    self._add("key_mean_square", kept.square().sum(0), kept.shape[0])

    def _add(self, name: str, value: Tensor, count: int) -> None:
        self.sums[name] = self.sums[name] + value.double() if name in self.sums else value.double()
        self.counts[name] = self.counts.get(name, 0) + count

    def finish(self) -> dict[str, Tensor]:
        means = {name: value / self.counts.get(name, 1) for name, value in self.sums.items()}
        means["key_variance"] = (means.pop("key_mean_square") - means["key_mean"].square()).clamp_min(0)
        return {name: value.float().cpu().contiguous() for name, value in means.items()}


def collect(
    source: Source,
    run: CalibrationRun,
    tokens: Tensor,
    device: torch.device | str = "cpu",
    on_layer: Callable[[int, int], None] | None = None,
) -> CalibrationStats:
    """Run `tokens` int [samples, seq] through `source` and gather its statistics.

    Raises:
        UsageError: sequences so short that all of them are sinks.
        NumericsError: an activation is not finite (naming layer and point).
    """
    if tokens.shape[1] <= SINK_TOKENS:
        raise UsageError(f"calibration sequences need more than {SINK_TOKENS} tokens, got {tokens.shape[1]}",
                         "raise --seq")  # fmt: skip
    hidden_size = source.config.hidden_size
    covariance = torch.zeros(hidden_size, hidden_size, dtype=torch.float64, device=device)
    observers: dict[int, _LayerObserver] = {}

    def observe(layer: int) -> Observe:
        observers[layer] = _LayerObserver(covariance)
        return observers[layer]

    tensors: dict[str, Tensor] = {}
    for layer, hidden in run_layers(source, tokens.long(), observe, device):
        found = observers.pop(layer).finish()
        for name, value in (*found.items(), ("output", hidden)):
            if not value.isfinite().all():
                raise NumericsError(
                    f"layer {layer}: {name} is not finite on the calibration text",
                    "the source model overflows on this text: check its weights, or try other text with --data",
                )
        tensors |= {f"layers.{layer}.{name}": value for name, value in found.items()}
        if on_layer:
            on_layer(layer, source.config.num_layers)
    tensors["residual_covariance"] = (covariance / tokens.shape[0]).float().cpu()
    return CalibrationStats(run, tokens.int(), tensors)


def save_statistics(stats: CalibrationStats, folder: Path) -> None:
    """Write the statistics folder; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "statistics.safetensors.part"
    save_file(stats.tensors | {"tokens": stats.tokens.contiguous()}, part)
    part.replace(folder / "statistics.safetensors")
    digest = hashlib.sha256((folder / "statistics.safetensors").read_bytes()).hexdigest()
    document = {"schema": SCHEMA, "run": asdict(stats.run), "sha256": digest}
    part = folder / "statistics.json.part"
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf8")
    part.replace(folder / "statistics.json")


def load_statistics(folder: Path) -> CalibrationStats:
    """Read a statistics folder.

    Raises:
        NotFoundError: no such folder. CheckpointError: damaged or of another schema.
    """
    description, numbers = folder / "statistics.json", folder / "statistics.safetensors"
    if not description.is_file() or not numbers.is_file():
        raise NotFoundError(f"{folder} is not a statistics folder", "make one: w4a4 calibrate MODEL -o " + str(folder))
    try:
        document = json.loads(description.read_text(encoding="utf8"))
        if document["schema"] != SCHEMA:
            raise CheckpointError(f"{description}: schema {document['schema']}, this version reads {SCHEMA}",
                                  "run w4a4 calibrate again")  # fmt: skip
        if hashlib.sha256(numbers.read_bytes()).hexdigest() != document["sha256"]:
            raise CheckpointError(f"{numbers}: SHA-256 differs from the one in {description.name}",
                                  "the file is damaged: run w4a4 calibrate again")  # fmt: skip
        tensors = load_file(numbers)
        run = CalibrationRun(**document["run"])
        tokens = tensors.pop("tokens")
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: not readable as statistics: {error}", "run w4a4 calibrate again") from error
    return CalibrationStats(run, tokens, tensors)
