"""The engine's runner over the packed model: it owns the weights, the KV pages and, on a GPU, the decode graphs.

A step on a GPU copies its indices once, packed in one buffer, and never waits for the device: where every sequence has
one new token a captured graph is replayed, everything else runs launch by launch. On a CPU the same model code runs and
the step is done when it returns.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from w4a4.configs.errors import ResourceError
from w4a4.export.checkpoint import open_checkpoint
from w4a4.kernels.layout import ActMode, LinearLayout
from w4a4.serve.cuda_graphs import DecodeGraphs, batch_buckets
from w4a4.serve.device import choose_device
from w4a4.serve.model import CausalLM
from w4a4.serve.pages import plan_pool
from w4a4.serve.runner import Batch, LayerPlan, RunnerInfo
from w4a4.serve.sampler import on_device
from w4a4.serve.settings import ServeSettings

GRAPH_BYTES = 1 << 30
"""Set aside on a GPU for the memory of captured graphs."""


def load_runner(settings: ServeSettings) -> ModelRunner:
    """Open the checkpoint that `settings` names, move it to its device and size the KV pages.

    Raises CheckpointError, NumericsError (weights), UnsupportedError (device), ResourceError (one request of the full
    length does not fit).
    """
    checkpoint = open_checkpoint(settings.checkpoint)
    device = choose_device(settings.device, for_kernels=True)
    model = CausalLM(checkpoint, device, choose_act(settings.act, device), settings.kv_bits)
    return ModelRunner(
        model,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
        max_model_len=settings.max_model_len,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_bytes=settings.kv_cache_bytes,
        is_eager=settings.is_eager,
    )


def choose_act(name: str | None, device: torch.device) -> ActMode:
    """The activation mode called `name`; None is the precision map, or 8 bits on Hopper, where they are free."""
    if name is None:
        return "map" if device.type == "cpu" else "a8"
    modes: dict[str, ActMode] = {"map": "map", "a8": "a8", "a16": "a16"}
    return modes[name]


class ModelRunner:
    """A packed model with its pages: `serve.runner.Runner`.

    Args:
        max_model_len: tokens of one sequence; None takes the model's own length, as far as the pages reach.
        gpu_memory_utilization: share of the GPU's memory for everything, weights included.
        kv_cache_bytes: size of the pages on a CPU.
        is_eager: no CUDA graphs.
    Raises:
        ResourceError: one request of `max_model_len` tokens does not fit.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_bytes: int = 1 << 30,
        is_eager: bool = False,
    ) -> None:
        self.model = model
        layout = model.kv_layout()
        page_bytes = layout.page_bytes * model.config.num_layers
        sink_bytes = page_bytes if layout.num_sinks else 0
        is_gpu = model.device.type == "cuda"
        available = kv_cache_bytes
        if is_gpu:
            available = gpu_bytes_left(model, gpu_memory_utilization, max_num_batched_tokens, max_num_seqs)
        if max_model_len is None:
            longest = (available - max_num_seqs * sink_bytes) // page_bytes * layout.page_size
            max_model_len = max(1, min(model.config.max_position_embeddings, longest))
        size = plan_pool(available, page_bytes, sink_bytes, layout.page_size, max_model_len, max_num_seqs)
        try:
            self.cache = model.allocate_cache(size.num_pages, size.num_sink_slots)
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"{available / 2**20:.0f} MiB of KV pages cannot be allocated on {model.device}",
                hint="lower --kv-cache-memory, or --gpu-memory-utilization on a GPU",
            ) from error
        self.graphs: DecodeGraphs | None = None
        if is_gpu and not is_eager:
            width = -(-max_model_len // layout.page_size)
            self.graphs = DecodeGraphs(model, self.cache, batch_buckets(max_num_seqs), width)
        self._info = RunnerInfo(
            num_pages=size.num_pages,
            page_size=layout.page_size,
            num_sink_slots=size.num_sink_slots,
            vocab_size=model.config.vocab_size,
            max_model_len=max_model_len,
            device=str(model.device),
            path=", ".join(sorted(set(model.paths().values()))) + f"; KV {model.kv_bits} bit",
            is_asynchronous=model.device.type == "cuda",
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @torch.inference_mode()
    def step(self, batch: Batch) -> Tensor:
        """See `serve.runner.Runner.step`."""
        device = self.model.device
        is_all_rows = batch.logit_rows.shape[0] == batch.num_tokens
        if self.graphs is not None and batch.is_decode and batch.num_seqs <= self.graphs.max_batch:
            ids = batch.input_ids if batch.device_ids is None else batch.device_ids
            logits = self.graphs.step(ids, batch.context_lens, batch.sink_slots, batch.block_tables)
            return logits if is_all_rows else logits[on_device(batch.logit_rows, device)]
        sinks = on_device(batch.sink_slots, device) if self.info.num_sink_slots else None
        tables = on_device(batch.block_tables, device)
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        indices = self.cache.known_batch(tables, starts, lengths, sinks)
        ids = on_device(batch.input_ids, device) if batch.device_ids is None else batch.device_ids
        hidden = self.model.forward(ids, indices, self.cache)
        if not is_all_rows:
            hidden = hidden[on_device(batch.logit_rows, device)]
        return self.model.logits(hidden)

    def explain(self) -> list[LayerPlan]:
        return [
            LayerPlan(
                name=name,
                shape=f"{linear.layout.out_features} x {linear.layout.in_features}",
                weight_bits=_bits(linear.layout, "weight_bits"),
                act_bits=_bits(linear.layout, "act_bits"),
                kernel=linear.path,
            )
            for name, linear in self.model.linears().items()
        ]

    def close(self) -> None:
        """Free the device memory. The runner is not used afterwards."""
        device = self.model.device
        del self.graphs, self.cache, self.model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def gpu_bytes_left(model: CausalLM, utilization: float, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes for KV pages beside the model, other programs on the GPU, and the largest step, which is run to measure it.

    Raises ResourceError where the largest step does not fit.
    """
    layout = model.kv_layout()
    longest = min(max_num_batched_tokens, model.config.max_position_embeddings)
    lengths = [longest] * (max_num_batched_tokens // longest) + [max_num_batched_tokens % longest]
    lengths = [length for length in lengths if length]
    num_pages = sum(-(-length // layout.page_size) for length in lengths)
    cache = model.allocate_cache(num_pages, 1)
    width = -(-longest // layout.page_size)
    table = torch.arange(len(lengths) * width, dtype=torch.int32, device=model.device) % num_pages
    starts = [0, *accumulate(lengths)]
    sinks = torch.zeros(len(lengths), dtype=torch.int32, device=model.device)
    ids = torch.arange(max_num_batched_tokens, device=model.device) % model.config.vocab_size
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    try:
        with torch.inference_mode():
            batch = cache.known_batch(table.view(len(lengths), width), starts, lengths, sinks)
            logits = model.logits(model.forward(ids, batch, cache)[:max_num_seqs])
            del logits
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"a step of {max_num_batched_tokens} tokens does not fit in the GPU's memory beside the weights",
            hint="lower --max-num-batched-tokens",
        ) from error
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * utilization) - (total - free) - peak - GRAPH_BYTES


def _bits(layout: LinearLayout, field: str) -> str:
    """Bits and the columns they hold for: "4" or "4 (504), 8 (72)"."""
    columns: dict[int, int] = {}
    for segment in layout.segments:
        bits = getattr(segment, field)
        columns[bits] = columns.get(bits, 0) + segment.width
    if len(columns) == 1:
        return str(next(iter(columns)))
    return ", ".join(f"{bits} ({width})" for bits, width in columns.items())
