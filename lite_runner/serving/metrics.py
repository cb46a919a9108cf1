"""Prometheus metrics, with vLLM's names so that its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lite_runner.serving.engine import Load

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one model."""

    def __init__(self, model: str, load: Callable[[], Load], adapter_slots: int = 0) -> None:
        """`adapter_slots`: adapters that can be loaded at a time."""
        self.registry = CollectorRegistry()
        names, registry = ("model_name",), self.registry

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            made = Gauge(f"vllm:{name}", text, names, registry=registry)
            made.labels(model).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, names, registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(f"vllm:{name}", text, names, registry=registry, buckets=buckets)
            return made.labels(model)

        gauge("num_requests_running", "Sequences in the batch.", lambda: load().running)
        gauge("num_requests_waiting", "Sequences that wait.", lambda: load().waiting)
        gauge("kv_cache_usage_perc", "Share of the KV cache in use.", lambda: load().cache_usage)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self.first_token = histogram("time_to_first_token_seconds", "To the first token.")
        self.between_tokens = histogram(
            "inter_token_latency_seconds", "Between two tokens.", _BETWEEN
        )
        self.queue = histogram("request_queue_time_seconds", "Until a request runs.")
        self.whole = histogram("e2e_request_latency_seconds", "Of whole requests.")
        self._finished = Counter(
            "vllm:request_success",
            "Sequences by how they ended.",
            labelnames=("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._refused = Counter(
            "lite_runner:requests_refused",
            "Requests by the status of their answer, other than 200.",
            labelnames=("status",),
            registry=self.registry,
        )
        self._adapters = Gauge(
            "vllm:lora_requests_info",
            "When it was asked for, with the adapters in use then.",
            labelnames=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            registry=self.registry,
        )
        self._model, self._load, self._slots = model, load, adapter_slots

    def finished(self, reason: str) -> None:
        """A sequence has ended."""
        self._finished.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """An answer with an error."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        self._adapters.clear()
        running, waiting = (",".join(sorted(names)) for names in self._load().adapters)
        self._adapters.labels(str(self._slots), waiting, running).set(time.time())
        return generate_latest(self.registry)
