"""Measures whole models on a Hopper GPU and writes results/bench-h200.json, part by part.

    python benchmarks/bench_h200.py 8b 8b-engine 8b-bf16 8b-fp8 70b 70b-fp8 --out benchmarks/results/bench-h200.json
    python benchmarks/bench_h200.py --compile FOLDER     # fills a kernel cache; needs no GPU

Parts: the shapes of Llama-3-8B and Llama-3-70B with random weights, ours and the baselines; `-engine`, requests
through scheduler, sampler and detokeniser; `-ablation`, what a decode step would save without each kernel. Records and
facts of a part replace those of an earlier run in --out; what was measured otherwise (other programs, perplexity)
stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4a4.configs.shapes import shape_of
from w4a4.kernels import kv4_sm90
from w4a4.kernels.compile_cache import Kernel, compile_to
from w4a4.kernels.kernel_set_sm90 import LinearUse, kernels_of
from w4a4.kernels.kv4 import KVPageLayout
from w4a4.kernels.layout import ActMode
from w4a4.kernels.quantize_sm90_variant import Source
from w4a4.serve.baselines import baseline_model
from w4a4.serve.bench import run as bench_run
from w4a4.serve.bench.breakdown import decode_breakdown
from w4a4.serve.bench.check import check_model
from w4a4.serve.bench.environment import clocks, environment
from w4a4.serve.bench.memory import kv_tokens, memory_split
from w4a4.serve.bench.run import BenchSettings, Candidate, Frame
from w4a4.serve.model import PAGE_SIZE, CausalLM
from w4a4.serve.random_weights import RandomModel, layout_of

SEQ, GEN = 1024, 128
NAMES = {"8b": "Llama-3-8B", "70b": "Llama-3-70B"}
ACTS: tuple[ActMode, ...] = ("a8", "map")
BREAKDOWN_BATCHES = (1, 16, 64, 256)
# Linears of one launch, what makes their input, and whether it is permuted.
FUSED: tuple[tuple[tuple[str, ...], tuple[Source, ...], bool], ...] = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("rmsnorm", "rmsnorm_residual"), False),
    (("self_attn.o_proj",), ("plain",), True),
    (("mlp.gate_proj", "mlp.up_proj"), ("rmsnorm", "rmsnorm_residual"), False),
    (("mlp.down_proj",), ("silu",), False),
)


@dataclass(frozen=True)
class Part:
    """What is measured of one model. combined: batches of 1,024 in and 512 out, 0 for the largest that fits."""

    shape: str
    kind: str = "w4a4"  # or a baseline
    decode: tuple[int, ...] = (1, 16, 64)
    prefill: tuple[int, ...] = (8,)
    combined: tuple[int, ...] = ()
    repetitions: int = 3


PARTS = {
    "8b": Part("8b", prefill=(1, 8), combined=(256,)),
    "8b-bf16": Part("8b", "bf16", combined=(256,), repetitions=2),
    "8b-fp8": Part("8b", "fp8", combined=(256,), repetitions=2),
    "70b": Part("70b", combined=(512, 0), repetitions=2),
    "70b-fp8": Part("70b", "fp8", decode=(1, 16, 64), combined=(0,), repetitions=1),
}
EXTRAS = ("8b-engine", "8b-ablation", "70b-ablation")


def build(part: Part) -> CausalLM:
    config = shape_of(f"llama3-{part.shape}")
    assert config is not None
    device = torch.device("cuda:0")
    packed = RandomModel(config, device)
    if part.kind == "w4a4":
        return CausalLM(packed, device, "a8")
    return baseline_model(packed, device, "fp8" if part.kind == "fp8" else "bf16")


def measured(part: Part, model: CausalLM) -> dict[str, Any]:
    """Records of a part, and facts of its model."""
    act = "a8" if part.kind == "w4a4" else {"bf16": "16"}.get(part.kind, part.kind)
    recipe = "dual" if part.kind == "w4a4" else "baseline"
    candidate = Candidate(part.kind, recipe, act, lambda: model)
    settings = BenchSettings(seq=SEQ, gen=GEN, repetitions=part.repetitions, act="a8")
    bench_run.RUN_IN_ONE_GO = 256 if part.kind == "w4a4" else 64  # of a baseline, larger batches are put together
    frame = Frame(model, candidate, f"{NAMES[part.shape]} (random weights)", settings)
    largest = frame.largest(SEQ + 512)
    tests = [
        *((frame.decode, batch) for batch in part.decode),
        *((frame.prefill, batch) for batch in part.prefill),
        *((frame.combined, batch or largest) for batch in part.combined),
    ]
    records = []
    for test, batch in tests:
        record = test(batch).to_dict()
        records.append(record)
        print(f"{time.monotonic() - START:6.1f} s  {part.shape} {part.kind} {record['test']} x {batch}: "
              f"{record['tok_s']:,.1f} tokens/s, {record.get('step_ms', 0):.3f} ms", flush=True)  # fmt: skip
    name = f"{part.shape.upper()} {part.kind}"
    return {
        "records": records,
        "kv_tokens": {name: kv_tokens(model)},
        "memory_split_gib": {name: memory_split(model)},
        "kernels": {name: [*sorted(set(model.paths().values())), model.attention_path(), model.head_path()]},
    }


def breakdowns(part: Part, model: CausalLM) -> list[dict[str, Any]]:
    found = []
    for batch in BREAKDOWN_BATCHES:
        release()
        entry = decode_breakdown(model, part.kind, batch, SEQ).to_dict()
        found.append(entry | {"model": NAMES[part.shape]})
        print(f"{time.monotonic() - START:6.1f} s  {part.shape} breakdown x {batch}: {entry['step_us']:,.0f} us "
              f"{entry['parts_us']}", flush=True)  # fmt: skip
    return found


def run_part(name: str) -> dict[str, Any]:
    shape, _, what = name.partition("-")
    if name in EXTRAS:
        model = build(Part(shape))
        if what == "engine":
            from engine_h200 import measure_engine

            return {"engine": measure_engine(model)}
        from step_ablation import ablation

        return {"ablation": [ablation(model, 16 if shape == "8b" else 64, SEQ) | {"model": NAMES[shape]}]}
    part = PARTS[name]
    model = build(part)
    print(f"{time.monotonic() - START:6.1f} s  {name} built", flush=True)
    found = measured(part, model)
    if part.kind == "w4a4":
        found["breakdown"] = breakdowns(part, model)
    if name == "8b":
        config, device = shape_of("llama3-8b"), torch.device("cuda:0")
        assert config is not None
        found["check"] = {
            **{f"{act} kv4": check_model(RandomModel(config, device), device, act, None).to_dict() for act in ACTS},
            "against": "the CPU reference on the first 2 layers and 8,192 tokens of the vocabulary of the 8B shape",
        }
    return found


def merged(held: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`held` with the facts of `new`: records and lists entry by entry, mappings key by key."""
    keys = {"records": ("model", "recipe", "act", "kv", "test", "batch"), "breakdown": ("model", "batch"),
            "ablation": ("model", "batch")}  # fmt: skip
    result = dict(held)
    for name, value in new.items():
        if name in keys:
            places = {tuple(entry.get(key) for key in keys[name]): entry for entry in held.get(name, [])}
            places |= {tuple(entry.get(key) for key in keys[name]): entry for entry in value}
            result[name] = list(places.values())
        elif isinstance(value, dict) and name in ("kv_tokens", "memory_split_gib", "kernels"):
            result[name] = held.get(name, {}) | value
        else:
            result[name] = value
    return result


def beside_baselines(records: list[dict[str, Any]]) -> None:
    """Give our records the baselines' tokens per second; the largest batches are compared whatever they are."""
    for record in records:
        if record["recipe"] == "baseline":
            continue
        test = record["test"].removesuffix(" engine")
        record["baselines"] = {
            "bf16" if other["act"] == "16" else other["act"]: other["tok_s"]
            for other in records
            if other["recipe"] == "baseline"
            and (other["model"], other["test"]) == (record["model"], test)
            and (other["batch"] == record["batch"] or "+" in test)
        }
        if not record["baselines"]:
            del record["baselines"]


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compile_all(folder: Path) -> None:
    """Every kernel of ours that the parts launch."""
    for shape in NAMES:
        config = shape_of(f"llama3-{shape}")
        assert config is not None
        kernels: dict[str, Kernel] = {}
        for names, sources, is_permuted in FUSED:
            rows = sum(config.linear_shapes()[name][0] for name in names)
            layout = layout_of(names[0], rows, config.linear_shapes()[names[0]][1])
            for act in ACTS:
                kernels |= kernels_of([LinearUse(layout.at(act), sources, is_permuted, False)])
        for bits, sinks, is_ours in ((4, 4, True), (16, 0, False)):
            pages = KVPageLayout(config.num_kv_heads, config.head_dim, PAGE_SIZE, bits, sinks)
            kernels |= kv4_sm90.kernels_of(pages, config.num_heads, torch.bfloat16, False, is_ours, is_ours)
        for kernel in kernels.values():
            compile_to(kernel, kv4_sm90.ARCH, folder)


START = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [*PARTS, *EXTRAS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(names))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="Of the sources, as the result names it.")
    parser.add_argument("--compile", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_all(arguments.compile)
        return
    if not arguments.parts or not set(arguments.parts) <= set(names):
        parser.error(f"parts are {', '.join(names)}, got {arguments.parts}")
    device = torch.device("cuda:0")
    facts: dict[str, Any] = environment(device) | {"clocks_before": clocks(device)}
    found: dict[str, Any] = {}
    for name in arguments.parts:
        found = merged(found, run_part(name))
        release()
        facts["clocks_after"] = clocks(device)
        if arguments.out:
            held = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
            whole = merged(held, facts | found | ({"commit": arguments.commit} if arguments.commit else {}))
            beside_baselines(whole.get("records", []))
            arguments.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
