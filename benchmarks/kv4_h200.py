"""Times decode attention over KV4 pages on a Hopper GPU beside 16-bit baselines: writes results/kv4-h200.json.

    python benchmarks/kv4_h200.py --out benchmarks/results/kv4-h200.json
    python benchmarks/kv4_h200.py --baselines EARLIER.json --out ...  # measures ours alone, within half a minute
    python benchmarks/kv4_h200.py --compile FOLDER      # fills a kernel cache; needs no GPU

Cold L2 (page pools rotate through more than 300 MB), random data and random page order, CUDA graphs of several
launches, median of replays. The 16-bit time is the best of our Triton split-KV kernel (paged, every sensible number of
splits) and PyTorch's SDPA over contiguous keys and values. `bytes` of decode counts codes, scales and zero points once.
Besides decode: the fused write, whose `bytes` are read once (q, k and v, cosines and sines, slots) or written once (q;
codes, scales and zero points of k and v), and a chunk of a prompt attending to its pages. Launches overlap as they do
in a model: a kernel starts while the one before it ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from w4a4.kernels import kv4_sm90
from w4a4.kernels.compile_cache import compile_to
from w4a4.kernels.kv4 import KVBatch, KVPageLayout, kv_attention, kv_rope_write
from w4a4.kernels.prompt_attention import attend_causally

COPY_BYTES_PER_SECOND = 4.27e12
COLD_BYTES = 300e6
PAGE_SIZE = 16
BASE_PAGE_SIZE = 64
HEADS = ((32, 8, 128), (64, 8, 128))
CONTEXTS = {64: (1024, 4096, 16384), 8: (1024, 8192, 32768), 1: (1024, 8192, 32768, 131072)}  # of each batch size
WRITES = (1, 64, 512, 2048, 8192)
PREFILLS = ((2048, 2048), (512, 8192), (2048, 32768))
CALLS = 12
"""Launches of a graph: its own start, some 10 us, is spread over them."""


def layout_of(heads: tuple[int, int, int], bits: int, page_size: int = PAGE_SIZE, num_sinks: int = 0) -> KVPageLayout:
    return KVPageLayout(heads[1], heads[2], page_size, bits, num_sinks)


def random_pages(layout: KVPageLayout, num_pages: int) -> Tensor:
    shape = (num_pages, layout.num_kv_heads, layout.head_bytes)
    if layout.bits == 16:
        return torch.randn(*shape[:2], shape[2] // 2, device="cuda", dtype=layout.dtype).view(torch.uint8)
    pages = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    parameters = pages[..., layout.page_size * layout.head_dim :].view(torch.float16)
    parameters.copy_(torch.rand(parameters.shape, device="cuda") * 0.2 + 0.1)
    return pages


def median_us(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Microseconds a call: the calls are captured in one graph, the median is over replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def rotated(sets: list[Any], call: Callable[[Any], Any]) -> list[Callable[[], Any]]:
    count = -(-CALLS // len(sets)) * len(sets)
    return [partial(call, sets[i % len(sets)]) for i in range(count)]


def decode_sets(layout: KVPageLayout, heads: int, batch: int, context: int, num_bytes: float) -> list[Any]:
    """Queries, pages and a planned batch, as often as it takes to leave L2 cold."""
    columns = -(-context // layout.page_size)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    sets = []
    for _ in range(max(1, min(16, int(COLD_BYTES // num_bytes)))):
        tables = torch.randperm(batch * columns, device="cuda").to(torch.int32).view(batch, columns)
        planned = KVBatch(tables, starts, lengths)
        query = torch.randn(batch, heads, layout.head_dim, device="cuda", dtype=torch.bfloat16)
        pages = random_pages(layout, batch * columns)
        if layout.bits == 4:
            kv_attention(query, pages, planned, layout, 0.1)  # the step's plan is made once for all layers
        sets.append((query, pages, planned))
    return sets


def baselines(heads: tuple[int, int, int], batch: int, context: int) -> Iterator[tuple[str, float]]:
    """Name and microseconds of every 16-bit decode."""
    from w4a4.kernels.kv16_sm90 import decode_16

    num_heads, num_kv_heads, dim = heads
    layout = layout_of(heads, 16, BASE_PAGE_SIZE)
    num_bytes = 4.0 * batch * context * num_kv_heads * dim
    sets = decode_sets(layout, num_heads, batch, context, num_bytes)
    for power in range(8):
        splits, ctas = 1 << power, (batch * num_kv_heads) << power
        if splits > max(1, context // BASE_PAGE_SIZE) or ctas > 16384 or (ctas < 128 and splits * 128 < context):
            continue

        def decode(held: Any, splits: int = splits) -> Tensor:
            query, pages, batch_of = held
            tables, lengths = batch_of.block_tables, batch_of.context_lengths
            return decode_16(query, pages, tables, lengths, layout.page_size, dim**-0.5, None, splits)

        yield f"Triton split-KV, {splits} splits", median_us(rotated(sets, decode), 5)
    del sets
    count = max(1, min(16, int(COLD_BYTES // num_bytes)))
    shapes = ((batch, num_heads, 1, dim), (batch, num_kv_heads, context, dim), (batch, num_kv_heads, context, dim))
    contiguous = [tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes) for _ in range(count)]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(held: Any, backend: Any = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*held, enable_gqa=True)

        try:
            attend(contiguous[0])
        except RuntimeError:
            continue  # this backend does not take these shapes
        yield f"SDPA {backend.name.split('_')[0].lower()}", median_us(rotated(contiguous, attend), 5)


def measure_decode(
    heads: tuple[int, int, int], batch: int, context: int, earlier: dict[str, Any] | None
) -> dict[str, Any]:
    """earlier: a result whose 16-bit times are taken over; None measures them."""
    layout = layout_of(heads, 4)
    num_bytes = batch * context * heads[1] * (heads[2] + 8)
    sets = decode_sets(layout, heads[0], batch, context, num_bytes)
    ours = median_us(rotated(sets, lambda held: kv_attention(*held, layout, heads[2] ** -0.5)))
    del sets
    if earlier is None:
        base = min(baselines(heads, batch, context), key=lambda found: found[1])
    else:
        case = (*heads, batch, context)
        (known,) = (
            r
            for r in earlier["records"]
            if (r["heads_q"], r["heads_kv"], r["head_dim"], r["batch"], r["context"]) == case
        )
        base = known["base16_name"], known["base16_us"]
    torch.cuda.empty_cache()
    return {
        "heads_q": heads[0],
        "heads_kv": heads[1],
        "head_dim": heads[2],
        "batch": batch,
        "context": context,
        "ours_us": round(ours, 2),
        "base16_us": round(base[1], 2),
        "base16_name": base[0],
        "bytes": num_bytes,
        "fraction": round(num_bytes / (ours * 1e-6) / COPY_BYTES_PER_SECOND, 3),
        "base16_fraction": round(
            4 * num_bytes * heads[2] / (heads[2] + 8) / (base[1] * 1e-6) / COPY_BYTES_PER_SECOND, 3
        ),
    }


def measure_write(heads: tuple[int, int, int], tokens: int) -> dict[str, Any]:
    num_heads, num_kv_heads, dim = heads
    layout = layout_of(heads, 4, num_sinks=4)
    all_heads = num_heads + 2 * num_kv_heads
    written = num_heads * dim * 2 + num_kv_heads * (dim + 8)
    num_bytes = tokens * (all_heads * dim * 2 + dim * 4 + 16 + written)
    sets = []
    mean = torch.randn(num_kv_heads, dim, device="cuda")
    for _ in range(max(1, min(64, int(COLD_BYTES // num_bytes)))):
        qkv = torch.randn(tokens, all_heads, dim, device="cuda", dtype=torch.bfloat16)
        cos, sin = (torch.randn(tokens, dim // 2, device="cuda") for _ in range(2))
        pages = random_pages(layout, -(-tokens // PAGE_SIZE) + 1)
        sets.append((qkv, cos, sin, pages, torch.randperm(tokens, device="cuda")))
    sinks = torch.full((tokens,), -1, device="cuda")
    microseconds = median_us(rotated(sets, lambda held: kv_rope_write(*held, layout, sinks, mean, True)))
    return {
        "heads_q": num_heads,
        "heads_kv": num_kv_heads,
        "head_dim": dim,
        "tokens": tokens,
        "us": round(microseconds, 2),
        "bytes": num_bytes,
        "fraction": round(num_bytes / (microseconds * 1e-6) / COPY_BYTES_PER_SECOND, 3),
    }


def measure_prefill(heads: tuple[int, int, int], tokens: int, context: int) -> dict[str, Any]:
    """The last `tokens` of a context attend to its pages, beside SDPA over contiguous bf16 with the same mask."""
    layout = layout_of(heads, 4)
    columns = context // PAGE_SIZE
    tables = torch.randperm(columns, device="cuda").to(torch.int32).view(1, columns)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    batch = KVBatch(tables, ends, torch.tensor([context], dtype=torch.int32, device="cuda"))
    query = torch.randn(tokens, heads[0], heads[2], device="cuda", dtype=torch.bfloat16)
    pages = random_pages(layout, columns)
    ours = median_us([lambda: kv4_sm90.kv4_prefill(query, pages, batch, 0, context, layout, 0.1)] * 4)
    keys, values = kv4_sm90.read_pages(pages, tables[:1], context, layout, None, torch.bfloat16)
    base = median_us([lambda: attend_causally(query[None], keys, values, 0.1, None)] * 4)
    return {
        "heads_q": heads[0],
        "heads_kv": heads[1],
        "head_dim": heads[2],
        "tokens": tokens,
        "context": context,
        "us": round(ours, 1),
        "sdpa_us": round(base, 1),
    }


def compile_kernels(folder: Path) -> None:
    for heads in HEADS:
        for num_sinks, has_mean in ((0, False), (4, True)):
            layout = layout_of(heads, 4, num_sinks=num_sinks)
            kernels = kv4_sm90.kernels_of(layout, heads[0], torch.bfloat16, False, has_mean, True)
            for kernel in kernels.values():
                compile_to(kernel, kv4_sm90.ARCH, folder)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--baselines", type=Path)
    parser.add_argument("--compile", type=Path)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_kernels(arguments.compile)
        return
    torch.manual_seed(0)
    earlier = json.loads(arguments.baselines.read_text()) if arguments.baselines else None
    records, writes, prefills = [], [], [] if earlier is None else list(earlier["prefill"])
    for heads in HEADS:
        for batch, context in [(b, n) for b, contexts in CONTEXTS.items() for n in contexts]:
            record = measure_decode(heads, batch, context, earlier)
            records.append(record)
            print(
                f"{heads} batch {batch} context {context}: {record['ours_us']:.1f} us ({record['fraction']:.0%}), "
                f"16 bit {record['base16_us']:.1f} us ({record['base16_fraction']:.0%}, {record['base16_name']}), "
                f"{record['base16_us'] / record['ours_us']:.2f}x",
                flush=True,
            )
        writes += [measure_write(heads, tokens) for tokens in WRITES]
        print(f"{heads} write " + " ".join(f"{r['tokens']}:{r['us']}us/{r['fraction']:.0%}" for r in writes[-5:]))
        if earlier is None:
            prefills += [measure_prefill(heads, *sizes) for sizes in PREFILLS]
            print(
                f"{heads} prefill "
                + " ".join(f"{r['tokens']}@{r['context']}:{r['us']}/{r['sdpa_us']}" for r in prefills[-3:])
            )
    if arguments.out:
        import triton

        result = {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__},
            "commit": commit(),
            "limit_bytes_per_second": COPY_BYTES_PER_SECOND,
            "page_size": PAGE_SIZE,
            "records": records,
            "write": writes,
            "prefill": prefills,
        }
        if earlier is not None:
            result["baseline_commit"] = earlier.get("baseline_commit", earlier["commit"])
            result["note"] = "base16 and prefill: measured at baseline_commit, all else at commit"
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
