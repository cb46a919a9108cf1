"""The keys of a server, and their validation errors."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Literal

from lite_runner.config.fields import Fault, Range, fault, show
from lite_runner.config.options import SessionOptions
from lite_runner.config.ranges import Count, Index, Positive
from lite_runner.config.session_checks import session_faults
from lite_runner.records import dataclass

# Each request says these itself.
_OF_REQUESTS = {
    "num_beams": "n samples are drawn; there is no beam search",
    "length_penalty": "there is no beam search",
    "num_return_sequences": "a request gives n",
    "logprobs": "a request gives it",
    "prompt_logprobs": "a request gives it",
    "adapter_id": "a request names its adapter as model",
    "max_length": "serve.max_length bounds prompt and completion together",
}


@dataclass(frozen=True, kw_only=True)
class Serve:
    """The server."""

    engine: Literal["local", "ray"]  # in this process, or on a Ray cluster
    replicas: Count  # of the model, on the cluster
    host: str
    port: Annotated[int, Range(0, 65535)]  # 0: a free one
    api_key: str  # env:NAME or a file; "": none
    max_running: Count  # sequences that are computed together: cache slots
    max_queue: Index  # sequences that wait; more are refused
    max_length: Count | None  # tokens of a prompt and its completion; null: the model's context
    token_budget: Count | None  # of a step; null: the backend's preference
    load_adapters: bool  # clients may load and unload adapters below adapter_root
    request_timeout: Positive  # seconds
    drain_timeout: Positive  # seconds for running requests after SIGTERM
    log_format: Literal["text", "json"]

    @property
    def is_public(self) -> bool:
        """Whether other machines reach it."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(SessionOptions):
    """A server of one model and its adapters; sampling keys are the defaults of requests."""

    prefix_cache: Literal["auto", "none"]
    serve: Serve


def serve_faults(config: ServeOptions) -> Iterator[Fault]:
    """Validation errors of a server."""
    for key, why in _OF_REQUESTS.items():
        if (value := getattr(config, key)) is not None:
            yield fault(key, f"{key}={show(value)} has no effect with run_mode=serve: {why}")
    if config.serve.engine == "local" and config.serve.replicas > 1:
        yield fault(
            "serve.replicas",
            f"serve.replicas={config.serve.replicas} needs serve.engine=ray, which runs replicas"
            " on a Ray cluster",
        )
    if config.serve.engine == "ray" and config.serve.load_adapters:
        yield fault(
            "serve.load_adapters",
            "serve.load_adapters=true needs serve.engine=local: with several replicas one alone"
            " would load an adapter",
        )
    if config.serve.is_public and not config.serve.api_key:
        yield fault(
            ("serve.host", "serve.api_key"),
            f"serve.host={config.serve.host} can be reached from other machines, which needs"
            " serve.api_key=env:NAME (or a file that holds the key); or serve.host=127.0.0.1",
        )
    for key in ("adapter_root", "adapter_path") if config.serve.load_adapters else ():
        if not getattr(config, key):
            why = "below which they are" if key == "adapter_root" else "whose sizes make room"
            yield fault(
                ("serve.load_adapters", key),
                f"serve.load_adapters=true needs {key}=, {why} for those that clients load",
            )
    yield from session_faults(config)
