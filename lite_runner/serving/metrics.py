"""Prometheus metrics, with vLLM's names so that its dashboards work."""

from __future__ import annotations

import platform
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from lite_runner import __version__
from lite_runner.records import dataclass
from lite_runner.serving.engine import Accepted, Ended, Failed, Load, Output, Piece
from lite_runner.serving.errors import of_exception

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.5, 1, 2.5)


class ServerMetrics:
    """The metrics of a server, whatever its models."""

    def __init__(self, build: Mapping[str, str] | None = None) -> None:
        """`build`: the versions of the packages that compute."""
        self.registry = registry = CollectorRegistry()
        self._refused = Counter(
            "lite_runner:requests_refused",
            "Requests by the status of their answer, other than 200.",
            labelnames=("status",),
            registry=registry,
        )
        self._asked, self._prompt_by_key, self._completion_by_key = (
            Counter(f"lite_runner:{name}_by_key", text, labelnames=("key",), registry=registry)
            for name, text in (
                ("requests", "Requests by the name of their key."),
                ("prompt_tokens", "Prompt tokens by the name of the key."),
                ("generation_tokens", "Generated tokens by the name of the key."),
            )
        )
        ProcessCollector(registry=registry)  # process_*: memory, CPU, files, start
        info = Info("lite_runner:build", "The program that serves.", registry=registry)
        info.info({"version": __version__, "python": platform.python_version(), **(build or {})})

    def refused(self, status: int) -> None:
        """An answer with an error."""
        self._refused.labels(str(status)).inc()

    def count_request(self, key: str, stats: RequestStats | None) -> None:
        """A request with a key of this name is over."""
        self._asked.labels(key).inc()
        if stats is not None:
            self._prompt_by_key.labels(key).inc(stats.usage.prompt)
            self._completion_by_key.labels(key).inc(stats.usage.completion)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)


class Metrics(ServerMetrics):
    """The metrics of a server of one model."""

    def __init__(
        self,
        model: str,
        load: Callable[[], Load],
        adapter_slots: int = 0,
        build: Mapping[str, str] | None = None,
    ) -> None:
        """`adapter_slots`: adapters that can be loaded at a time; `build`: what computes."""
        super().__init__(build)
        names, registry = ("model_name",), self.registry

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            gauge = Gauge(f"vllm:{name}", text, names, registry=registry)
            gauge.labels(model).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, names, registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            histogram = Histogram(f"vllm:{name}", text, names, registry=registry, buckets=buckets)
            return histogram.labels(model)

        gauge("num_requests_running", "Sequences in the batch.", lambda: load().running)
        gauge("num_requests_waiting", "Sequences that wait.", lambda: load().waiting)
        gauge("kv_cache_usage_perc", "Share of the KV cache in use.", lambda: load().cache_usage)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._preemptions = counter("num_preemptions", "Sequences that made room for others.")
        self._preempted = 0  # of these the ones that are counted
        self.drafts = counter("spec_decode_num_drafts", "Steps of a sequence that drafted tokens.")
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens computed ahead.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Of these, that were chosen.")
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
        self._adapters = Gauge(
            "vllm:lora_requests_info",
            "When it was asked for, with the adapters in use then.",
            labelnames=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            registry=self.registry,
        )
        self._model, self._load, self._slots = model, load, adapter_slots

    def finished(self, reason: str, count: int) -> None:
        """So many sequences have ended, or were cut."""
        if count:
            self._finished.labels(self._model, reason).inc(count)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        preempted = self._load().preemptions
        self._preemptions.inc(preempted - self._preempted)
        self._preempted = preempted
        self._adapters.clear()
        running, waiting = (",".join(sorted(names)) for names in self._load().adapters)
        self._adapters.labels(str(self._slots), waiting, running).set(time.time())
        return super().text()


class _Families:
    """Metrics of several servers as one registry has them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Prometheus' protocol."""
        return self._families


def merged(texts: Iterable[tuple[Mapping[str, str], str]]) -> bytes:
    """The metrics of several servers in one text: (labels that tell it, its text) of each."""
    families: dict[str, Metric] = {}
    for labels, text in texts:
        for family in text_string_to_metric_families(text):
            samples = [one._replace(labels={**labels, **one.labels}) for one in family.samples]
            whole = families.setdefault(family.name, family)
            whole.samples = [*(whole.samples if whole is not family else ()), *samples]
    return generate_latest(cast(CollectorRegistry, _Families(families.values())))


@dataclass
class Usage:
    """Tokens of one call."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int | None = None  # of the completion; None: the model does not think
    drafted: int = 0  # computed ahead
    accepted: int = 0  # of these


class RequestStats:
    """Usage and times of one call, which are added to the metrics."""

    def __init__(self, metrics: Metrics, prompts: list[int], returns: int) -> None:
        """`prompts`: tokens of each; `returns`: sequences of each."""
        self.usage = Usage(prompt=sum(prompts))
        self.open = len(prompts) * returns  # sequences that are not over
        self._metrics, self._began = metrics, time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # time of the newest token
        self._waited: float | None = None  # seconds in the queue
        self._first = 0.0  # time of the first token

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """(name, begin, end) of finished phases, by time.perf_counter."""
        if self._waited is not None:
            runs = self._began + self._waited
            yield "queue", self._began, runs
            if self._last:
                yield "prefill", runs, self._first
        if self._last:
            yield "decode", self._first, max(self._last.values())

    async def follow(
        self, outputs: AsyncIterator[tuple[int, Output]]
    ) -> AsyncGenerator[tuple[int, Piece | Ended], None]:
        """The pieces and ends of all sequences. Raises ApiError where one fails."""
        metrics, cut = self._metrics, "abort"  # as vLLM calls it, where the client leaves
        metrics.prompt_tokens.inc(self.usage.prompt)
        metrics.prefix_queries.inc(self.usage.prompt)
        try:
            async for place, output in outputs:
                if isinstance(output, Failed):
                    raise of_exception(output.error)
                if isinstance(output, Accepted):
                    continue
                if isinstance(output, Piece):
                    self._count(place, output)
                else:
                    self._finish(output)
                yield place, output
                if not self.open:
                    break
        except Exception as error:
            cut = "timeout" if isinstance(error, TimeoutError) else "error"
            raise
        finally:
            metrics.finished(cut, self.open)
        metrics.whole.observe(time.perf_counter() - self._began)

    def _count(self, place: int, piece: Piece) -> None:
        metrics, now = self._metrics, time.perf_counter()
        self.usage.completion += 1
        metrics.generation_tokens.inc()
        before = self._last.get((place, piece.index))
        if before is not None:
            metrics.between_tokens.observe(now - before)
        elif not self._last:
            metrics.first_token.observe(now - self._began)
            self._first = now
        self._last[place, piece.index] = now

    def _finish(self, ended: Ended) -> None:
        self.open -= 1
        self._metrics.finished(ended.finish_reason, 1)
        completion = ended.completion
        self.usage.drafted += completion.drafted_tokens
        self.usage.accepted += completion.accepted_tokens
        self._metrics.drafts.inc(completion.drafts)
        self._metrics.drafted.inc(completion.drafted_tokens)
        self._metrics.accepted.inc(completion.accepted_tokens)
        if completion.end_token is not None:
            self.usage.completion += 1
            self._metrics.generation_tokens.inc()
        if ended.index == 0:  # the prompt is computed once for all of its sequences
            self.usage.cached += completion.cached_tokens
            self._metrics.queue.observe(completion.waited_s)
            self._waited = completion.waited_s
            self._metrics.prefix_hits.inc(completion.cached_tokens)
