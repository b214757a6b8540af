"""Prometheus metrics: vLLM's names under `w4a4:`, so that its dashboards need one search and replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from w4a4.serve.engine import EngineStats
from w4a4.serve.request import FinishReason, Output

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _EngineCollector:
    """The engine's own counts, read when somebody asks."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        usage = stats.num_pages_in_use / stats.num_pages if stats.num_pages else 0.0
        gauges = (
            ("num_requests_running", "Requests that run in the engine.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pages in use; 1 means all.", usage),
        )
        counters = (
            ("num_preemptions", "Preemptions since the start.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.num_output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_hits),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"w4a4:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"w4a4:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, model_name))
        self._model_name = model_name
        self._success = self._counter("request_success", "Requests finished, by reason.", "finished_reason")
        self.rejected = self._counter("request_rejected", "Requests refused because the queue was full.").labels(
            model_name
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", TOKEN_BUCKETS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = self._histogram("request_prompt_tokens", "Length of prompts.", LENGTH_BUCKETS)
        self._generation = self._histogram("request_generation_tokens", "Length of answers.", LENGTH_BUCKETS)

    def observe(self, output: Output) -> None:
        """Count a request that has ended; `output` is its last one."""
        times = output.times
        if output.finish_reason is None or times is None:
            return
        self._success.labels(self._model_name, output.finish_reason.value).inc()
        self._prompt.observe(output.num_prompt_tokens)
        self._generation.observe(output.num_output_tokens)
        self._latency.observe(times.finished - times.arrived)
        if times.scheduled:
            self._queue.observe(times.scheduled - times.arrived)
        if times.first_token:
            self._first_token.observe(times.first_token - times.arrived)
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.finished - times.first_token)
            if output.num_output_tokens > 1:
                self._per_token.observe((times.finished - times.first_token) / (output.num_output_tokens - 1))

    def count_abort(self) -> None:
        """Count a request whose client went away."""
        self._success.labels(self._model_name, FinishReason.ABORT.value).inc()

    def render(self) -> bytes:
        text: bytes = generate_latest(self._registry)
        return text

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"w4a4:{name}", text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        histogram = Histogram(f"w4a4:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)
