"""Perplexity of a packed model through the GPU's kernels beside references: entries of `perplexity` in bench-h200.json.

    python benchmarks/perplexity_h200.py reference CHECKPOINT FOLDER    # the CPU reference; FOLDER keeps its losses
    python benchmarks/perplexity_h200.py whole CHECKPOINT FOLDER --json whole.json      # a GPU against those
    python benchmarks/perplexity_h200.py attention CHECKPOINT --windows 32 --json attention.json

`whole` differs from the reference in everything that a GPU rounds. `attention` isolates the KV4 kernels: one model on
the GPU, the same linears, once with attention in float64 on the pages as they are (the law of kernels/kv4.py, rounded
to the same bf16 output) and once through the kernels. `reference's pages`: both read the keys and values that the first
one wrote, so that only the kernel differs; `own pages`: each reads its own, whose codes then move as well.
A chunk of a prompt goes through the decode kernel as so many sequences of one token each, which share their pages.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4a4.calibrate.text import load_text
from w4a4.export.checkpoint import PackedCheckpoint, open_checkpoint
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, attend_in_float64, kv_rope_write
from w4a4.serve.attention import AttentionStep, HeadWeights, PagedAttention
from w4a4.serve.cuda_graphs import DecodeGraph
from w4a4.serve.model import PAGE_SIZE, CausalLM, KVCache

WINDOW, CHUNK = 2048, 512
CLEAR = 1.0  # nats by which the best logit leads

Attend = Callable[[Tensor, Tensor, KVBatch, KVPageLayout, float, int | None], Tensor]


@dataclass(frozen=True)
class Scores:
    """Of every scored token: its loss, the most probable token, and by how much that one leads."""

    loss: Tensor
    top: Tensor
    lead: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> Scores:
        """logits [n, V] of the positions before `targets` [n]."""
        logits = logits.float()
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double()
        best = logits.topk(2)
        return cls(loss.cpu(), best.indices[:, 0].cpu(), (best.values[:, 0] - best.values[:, 1]).cpu())

    @classmethod
    def joined(cls, parts: list[Scores]) -> Scores:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("loss", "top", "lead")))

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.loss.mean()))

    def against(self, reference: Scores) -> dict[str, Any]:
        """The keys of an entry that compare two runs over the same tokens."""
        difference = self.loss - reference.loss
        same = (self.top == reference.top).double()
        return {
            "tokens": len(difference),
            "reference": float(f"{reference.perplexity:.6g}"),
            "gpu": float(f"{self.perplexity:.6g}"),
            "loss_difference": float(f"{float(difference.mean()):.3g}"),
            "loss_difference_stderr": float(f"{float(difference.std()) / len(difference) ** 0.5:.3g}"),
            "agreement": round(float(same.mean()), 4),
            "agreement_clear": round(float(same[reference.lead >= CLEAR].mean()), 4),
        }


def windows_of(checkpoint: Path, count: int) -> Tensor:
    """int64 [count, WINDOW]: the first windows of WikiText-2's test."""
    from transformers import AutoTokenizer

    text = load_text("wikitext2-bundled", "test")
    ids = AutoTokenizer.from_pretrained(checkpoint).encode(str(text)[: count * WINDOW * 8], add_special_tokens=False)
    return torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)


@torch.inference_mode()
def in_chunks(model: CausalLM, windows: Tensor) -> Scores:
    """Every window as a prompt of its own, in chunks."""
    parts = []
    for window in windows.to(model.device):
        hidden = model.hidden_states(window[None], CHUNK)[0]
        for start in range(0, WINDOW - 1, CHUNK):
            stop = min(start + CHUNK, WINDOW - 1)
            parts.append(Scores.of(model.logits(hidden[start:stop]), window[start + 1 : stop + 1]))
    return Scores.joined(parts)


@torch.inference_mode()
def token_by_token(model: CausalLM, windows: Tensor) -> Scores:
    """All windows together, one given token each a step, through the captured decode step."""
    count, width = len(windows), WINDOW // PAGE_SIZE
    cache = model.allocate_cache(count * width, count)
    graph = DecodeGraph(model, cache, count, width)
    graph.block_tables.copy_(torch.arange(count * width).view(count, width))
    graph.sink_pages.copy_(torch.arange(count) + cache.num_pages)
    tokens = windows.to(model.device)
    parts = []
    for step in range(WINDOW - 1):
        graph.input_ids.copy_(tokens[:, step])
        graph.context_lengths.fill_(step + 1)
        parts.append(Scores.of(graph.replay(), tokens[:, step + 1]))
    joined = Scores.joined(parts)  # step by step: put in order of windows
    return Scores(*(getattr(joined, name).view(-1, count).T.flatten() for name in ("loss", "top", "lead")))


class OtherAttention:
    """A model's attention with another way to read pages: those it has written, or `pages` of every layer."""

    def __init__(self, own: PagedAttention, attend: Attend, pages: tuple[Tensor, ...] | None = None) -> None:
        self._own, self._attend, self._pages = own, attend, pages
        self._layer = 0
        self.path = own.path

    def begin(self, batch: KVBatch) -> AttentionStep:
        self._layer = 0
        return self._own.begin(batch)

    def attend(self, qkv: Tensor, weights: HeadWeights, pages: Tensor, step: AttentionStep) -> Tensor:
        own = self._own
        dim = own.config.head_dim
        q = kv_rope_write(
            qkv.view(qkv.shape[0], -1, dim), step.cos, step.sin, pages, step.slots, own.layout, step.sink_slots,
            weights.k_mean, own.use_hadamard, weights.norms, own.config.rms_norm_eps,
        )  # fmt: skip
        read = pages if self._pages is None else self._pages[self._layer]
        self._layer += 1
        return self._attend(q, read, step.batch, own.layout, dim**-0.5, weights.window).flatten(1)


def through_decode(
    q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None
) -> Tensor:
    """A chunk of one sequence as sequences of one token each over the same pages."""
    from w4a4.kernels.kv4_sm90 import kv4_decode

    def each() -> KVBatch:
        rows = q.shape[0]
        tables = batch.block_tables.expand(rows, -1).contiguous()
        starts = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        sinks = None if batch.sink_pages is None else batch.sink_pages.expand(rows).contiguous()
        return KVBatch(tables, starts, batch.positions.int() + 1, sinks)

    return kv4_decode(q, pages, batch.planned("each row", each), layout, scale, window)


def through_prompts(
    q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None
) -> Tensor:
    from w4a4.kernels.kv4_sm90 import attention

    return attention(q, pages, batch, layout, scale, window)


@torch.inference_mode()
def attention_alone(model: CausalLM, windows: Tensor) -> list[dict[str, Any]]:
    """The kernels against float64 on the same model: see the module docstring."""
    own = model.attention
    errors: dict[str, float] = {}

    def law(q: Tensor, pages: Tensor, batch: KVBatch, layout: KVPageLayout, scale: float, window: int | None) -> Tensor:
        exact = attend_in_float64(q.double(), pages, batch, layout, scale, window)
        for name, kernel in kernels.items():
            got = kernel(q, pages, batch, layout, scale, window)
            error = float((got.double() - exact).norm() / exact.norm())
            errors[name] = max(errors.get(name, 0.0), error)
        return exact.to(q.dtype)

    kernels: dict[str, Attend] = {"decode kernel": through_decode, "prompt kernels": through_prompts}
    num_pages = WINDOW // PAGE_SIZE
    caches = [model.allocate_cache(num_pages, 1) for _ in range(4)]
    ways = {
        "reference": (OtherAttention(own, law), caches[0]),
        "decode kernel, reference's pages": (OtherAttention(own, through_decode, caches[0].pages), caches[1]),
        "prompt kernels, reference's pages": (OtherAttention(own, through_prompts, caches[0].pages), caches[2]),
        "decode kernel, own pages": (OtherAttention(own, through_decode), caches[3]),
    }
    parts: dict[str, list[Scores]] = {name: [] for name in ways}
    for window in windows.to(model.device):
        for start in range(0, WINDOW, CHUNK):
            for name, (attention, cache) in ways.items():
                model.attention = attention  # type: ignore[assignment]
                parts[name].append(_chunk(model, cache, window, start))
    model.attention = own
    scores = {name: Scores.joined(part) for name, part in parts.items()}
    reference = scores.pop("reference")
    return [
        {"path": f"KV4 alone: {name}", **score.against(reference), "attention_error": float(f"{errors[kernel]:.3g}")}
        for name, score in scores.items()
        for kernel in errors
        if name.startswith(kernel)
    ]


def _chunk(model: CausalLM, cache: KVCache, window: Tensor, start: int) -> Scores:
    table = torch.arange(cache.num_pages, dtype=torch.int32, device=model.device)[None]
    sinks = torch.zeros(1, dtype=torch.int32, device=model.device)
    ids = window[start : start + CHUNK]
    batch = cache.known_batch(table, [0, len(ids)], [start + len(ids)], sinks)
    targets = window[start + 1 : start + CHUNK + 1]
    return Scores.of(model.logits(model.forward(ids, batch, cache)[: len(targets)]), targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["reference", "whole", "attention"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", help="Where the reference's losses are.")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--act", choices=["map", "a8"], default="a8")
    parser.add_argument("--name", default="", help="Of the model; default: the checkpoint's folder.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    checkpoint: PackedCheckpoint = open_checkpoint(arguments.checkpoint)
    head = {"model": arguments.name or arguments.checkpoint.name, "act": arguments.act}
    if arguments.what == "attention":
        windows = windows_of(arguments.checkpoint, arguments.windows)
        entries = attention_alone(CausalLM(checkpoint, "cuda:0", arguments.act), windows)
    else:
        file = arguments.folder / f"{arguments.checkpoint.name}-{arguments.act}.pt"
        if arguments.what == "reference":
            windows = windows_of(arguments.checkpoint, arguments.windows)
            scores = in_chunks(CausalLM(checkpoint, "cpu", arguments.act), windows)
            torch.save({"windows": windows, "loss": scores.loss, "top": scores.top, "lead": scores.lead}, file)
            print(f"{file}: perplexity {scores.perplexity:.4f}")
            return
        held = torch.load(file, weights_only=True)
        windows = held.pop("windows")
        reference, model = Scores(**held), CausalLM(checkpoint, "cuda:0", arguments.act)
        entries = [
            {"path": "chunks of 512", **in_chunks(model, windows).against(reference)},
            {"path": "decode graph, token by token", **token_by_token(model, windows).against(reference)},
        ]
    entries = [head | entry for entry in entries]
    print(json.dumps(entries, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
