"""The tests of `w4a4 bench`, for our model and for every baseline, one model in memory at a time.

    pp1024           prefill of 1,024 tokens, at batch 1 and at the first batch above it
    tg128@1024       128 greedy decode steps that start at a context of 1,024 tokens, at every batch
    pp1024+tg512     prefill and decode of the largest batch that fits; with `max` among the batches

Random tokens, random KV entries; every test runs before it is timed (compilation, graph capture, clocks): decode once,
prefill three times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from w4a4.configs.errors import ResourceError, UsageError
from w4a4.kernels.layout import ActMode
from w4a4.serve.baselines import Kind, baseline_model
from w4a4.serve.bench.fixed_batch import FixedBatch
from w4a4.serve.bench.memory import (
    UTILIZATION,
    head_bytes,
    kv_token_bytes,
    kv_tokens,
    largest_batch,
    linear_bytes,
    model_bytes,
)
from w4a4.serve.bench.records import Record
from w4a4.serve.bench.roofline import limits_of, step_cost
from w4a4.serve.bench.timing import Timing, measure
from w4a4.serve.model import CausalLM, PackedModel

Batch = int | Literal["max"]
BASELINES: dict[str, Kind] = {"bf16": "bf16", "fp8": "fp8"}
COMBINED_GEN = 512
RUN_IN_ONE_GO = 256
"""Largest batch whose combined test is run as it stands; above it, prefill is timed on some of the sequences."""
SAMPLE_SEQUENCES = 8
SAMPLE_STEPS = 8
WARM_PREFILLS = 3
"""Runs of a prefill that are not counted: as many as attention takes to know that a shape recurs."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure. `batches`: sizes, or "max". `baselines`: names of `BASELINES`."""

    seq: int = 1024
    gen: int = 128
    batches: tuple[Batch, ...] = (1, 8, 64, "max")
    baselines: tuple[str, ...] = ()
    repetitions: int = 5
    act: ActMode = "map"
    kv_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq", "gen", "repetitions"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.batches or any(batch != "max" and batch < 1 for batch in self.batches):
            raise UsageError(f"--batch must be sizes of at least 1, or max, got {self.batches}")
        unknown = [name for name in self.baselines if name not in BASELINES]
        if unknown:
            raise UsageError(f"no baseline {unknown[0]!r}", f"--baseline {','.join(BASELINES)}")


@dataclass(frozen=True)
class Candidate:
    """One way to run the model: how it is called in the records, and how it is made."""

    name: str
    recipe: str
    act: str
    build: Callable[[], CausalLM]


def candidates(packed: PackedModel, device: torch.device, settings: BenchSettings) -> list[Candidate]:
    """Ours first, then the baselines."""

    def ours() -> CausalLM:
        return CausalLM(packed, device, settings.act, settings.kv_bits)

    def baseline(kind: Kind) -> Callable[[], CausalLM]:
        return lambda: baseline_model(packed, device, kind)

    recipe = str(packed.quantization["recipe"])
    found = [Candidate("w4a4", recipe, settings.act, ours)]
    for name in settings.baselines:
        kind = BASELINES[name]
        found.append(Candidate(name, "baseline", "16" if kind == "bf16" else kind, baseline(kind)))
    return found


def run_all(
    packed: PackedModel,
    model_name: str,
    device: torch.device,
    settings: BenchSettings,
    on_record: Callable[[Record], None] = lambda record: None,
    on_model: Callable[[Candidate, CausalLM], None] = lambda candidate, model: None,
) -> list[Record]:
    """Every test of every candidate; our records come with the baselines' speeds, and the baselines' follow them.

    on_record: called as each is measured, without baselines. on_model: called with every model while it is in memory.
    Baselines that do not fit in the device's memory are left out.
    """
    by_name: dict[str, list[Record]] = {}
    for candidate in candidates(packed, device, settings):
        if candidate.recipe == "baseline" and not _fits(packed, candidate, device):
            continue
        model = candidate.build()
        on_model(candidate, model)
        found = by_name.setdefault(candidate.name, [])
        for record in run_tests(model, candidate, model_name, settings):
            on_record(record)
            found.append(record)
        del model
        _release(device)
    ours, *_ = by_name.values()
    merged = []
    for record in ours:
        others = {
            name: other.tok_s
            for name, records in by_name.items()
            if records is not ours
            for other in records
            if _same_test(other, record)
        }
        merged.append(record.with_baselines(others))
    return merged + [record for records in list(by_name.values())[1:] for record in records]


def _same_test(other: Record, record: Record) -> bool:
    """Equal tests at equal batches; a test of the largest batch that fits is compared whatever the batches are."""
    is_largest = "+" in record.test
    return other.test == record.test and (is_largest or other.batch == record.batch)


def run_tests(model: CausalLM, candidate: Candidate, model_name: str, settings: BenchSettings) -> Iterator[Record]:
    frame = Frame(model, candidate, model_name, settings)
    tokens = settings.seq + settings.gen
    wanted = [batch for batch in settings.batches if batch != "max"]
    sizes = [batch for batch in wanted if frame.fits(batch, tokens)]
    if wanted and not sizes:
        raise ResourceError(
            f"the KV pages of {wanted[0]} sequences of {tokens} tokens do not fit on {model.device}",
            f"--batch {frame.largest(tokens)} or fewer",
        )
    for batch in sizes[:2]:
        yield frame.prefill(batch)
    for batch in sizes:
        yield frame.decode(batch)
    if "max" in settings.batches:
        yield frame.combined(frame.largest(settings.seq + COMBINED_GEN))


class Frame:
    """The tests of one model, each a record."""

    def __init__(self, model: CausalLM, candidate: Candidate, model_name: str, settings: BenchSettings) -> None:
        self.model, self.settings = model, settings
        self.device = model.device
        self.kv_tokens = kv_tokens(model) if self.device.type == "cuda" else None
        paths = sorted(set(model.paths().values()))
        self.path = ", ".join(paths)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.limits = limits_of(name)
        self.record = Record(
            model=model_name, size_gib=model_bytes(model) / 2**30, recipe=candidate.recipe, act=candidate.act,
            kv=model.kv_bits, path=self.path, test="", batch=0, seq=settings.seq, gen=0, tok_s=0.0, spread=0.0,
            repetitions=settings.repetitions, step_ms=0.0, kv_tokens=self.kv_tokens,
        )  # fmt: skip

    def fits(self, batch: int, tokens: int) -> bool:
        return batch <= largest_batch(self.model, tokens)

    def largest(self, tokens: int) -> int:
        return largest_batch(self.model, tokens)

    def prefill(self, batch: int) -> Record:
        seq = self.settings.seq
        self._reset_peak()
        run = FixedBatch(self.model, batch, seq + 1)
        timing = measure(lambda: run.prefill(seq), self.device, self.settings.repetitions, WARM_PREFILLS)
        roofline = self._roofline(batch, seq, seq, timing.median)
        return self._record(f"pp{seq}", batch, 0, batch * seq, timing, timing.median, roofline)

    def decode(self, batch: int) -> Record:
        seq, gen = self.settings.seq, self.settings.gen
        self._reset_peak()
        run = FixedBatch(self.model, batch, seq + gen)
        timing = self._decode_timing(run, seq, gen, self.settings.repetitions)
        roofline = self._roofline(batch, 1, seq + gen / 2, timing.median / gen)
        return self._record(f"tg{gen}@{seq}", batch, gen, batch * gen, timing, timing.median / gen, roofline)

    def combined(self, batch: int) -> Record:
        """`COMBINED_GEN` output tokens per sequence after `seq` of prompt; tok_s counts the output tokens."""
        seq, gen = self.settings.seq, COMBINED_GEN
        test = f"pp{seq}+tg{gen}"
        self._reset_peak()
        run = FixedBatch(self.model, batch, seq + gen)
        if batch <= RUN_IN_ONE_GO:
            run.seek(seq)
            run.decode(1)

            def everything() -> None:
                run.prefill(seq)
                run.seek(seq)
                run.decode(gen)

            timing = measure(everything, self.device, repetitions=1, warmup=0)
            record = self._record(test, batch, gen, batch * gen, timing, None, None)
            return replace(record, repetitions=1)
        part = FixedBatch(self.model, SAMPLE_SEQUENCES, seq + 1)
        prefill = measure(lambda: part.prefill(seq), self.device, 3, WARM_PREFILLS).scaled(batch / SAMPLE_SEQUENCES)
        decode = None
        for context in (seq, seq + gen // 2, seq + gen - SAMPLE_STEPS):
            timing = self._decode_timing(run, context, SAMPLE_STEPS, 3).scaled(gen / SAMPLE_STEPS / 3)
            decode = timing if decode is None else decode + timing
        assert decode is not None
        record = self._record(test, batch, gen, batch * gen, prefill + decode, None, None)
        return replace(record, repetitions=3, composed=True)

    def _decode_timing(self, run: FixedBatch, context: int, steps: int, repetitions: int) -> Timing:
        def warm_and_seek() -> None:
            run.seek(context)

        return measure(lambda: run.decode(steps), self.device, repetitions, setup=warm_and_seek)

    def _record(
        self, test: str, batch: int, gen: int, tokens: int, timing: Timing, step: float | None, roofline: float | None
    ) -> Record:
        return replace(
            self.record,
            test=test,
            batch=batch,
            gen=gen,
            tok_s=tokens / timing.median,
            spread=timing.spread,
            step_ms=None if step is None else 1e3 * step,
            roofline=roofline,
            peak_gib=torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None,
        )

    def _roofline(self, batch: int, new_tokens: int, context: float, seconds: float) -> float | None:
        if self.limits is None:
            return None
        cost = step_cost(
            self.model.config,
            linear_bytes(self.model),
            head_bytes(self.model),
            kv_token_bytes(self.model),
            batch,
            new_tokens,
            context,
        )
        return cost.seconds(self.limits, self.path) / seconds

    def _reset_peak(self) -> None:
        _release(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def _fits(packed: PackedModel, candidate: Candidate, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    config = packed.config
    head = 2 * config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    linears = sum(rows * columns for rows, columns in config.linear_shapes().values()) * config.num_layers
    need = head + linears * (1 if candidate.act == "fp8" else 2)
    return need < UTILIZATION * torch.cuda.get_device_properties(device).total_memory


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
