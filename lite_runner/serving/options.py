"""The keys of a server, their validation errors, and its plan."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lite_runner.config import Invalid, invalid, show, size_errors
from lite_runner.config.generation import Pooling
from lite_runner.config.schema import PrefixCache, SessionOptions
from lite_runner.config.sections import AdapterSource
from lite_runner.plan import Plan
from lite_runner.records import (
    Count,
    Index,
    InputPath,
    NotNegative,
    OutputPath,
    Positive,
    Range,
    dataclass,
)

LATER_RANK = 16  # of adapters that come later, where none is given that says it
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")
_HOST = re.compile(r"(\*\.)?[\w.-]+|\[[0-9a-fA-F:.]+\]")
ToolParser = Literal[
    "chatglm3",
    "cohere",
    "deepseek_v3",
    "deepseek_v31",
    "gemma",
    "gemma4",
    "glm4",
    "glm45",
    "granite",
    "harmony",
    "hermes",
    "hunyuan_a13b",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "nemotron_json",
    "phi4",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]


@dataclass(frozen=True, kw_only=True)
class Serve:
    """The server."""

    engine: Literal["local", "ray"]  # in this process, or on a Ray cluster
    replicas: Count  # of the model, on the cluster
    models: tuple[str, ...]  # served together, each loaded when asked for; (): model= alone
    memory: str | None  # of the server, as 8GB; null: the free memory
    load_timeout: Positive  # seconds that a request waits for its model
    batch: InputPath  # a file of requests that are answered instead; "": none
    batch_output: OutputPath  # "": beside it
    host: str
    port: Annotated[int, Range(0, 65535)]  # 0: a free one
    api_key: str  # env:NAME or a file; "": none
    requests_per_minute: Count | None  # of each key; null: any number
    tokens_per_minute: Count | None
    tls_cert: str  # PEM files of a certificate and its key; "": no TLS
    tls_key: str
    model_name: str | tuple[str, ...] | None  # the first is shown; null: the model's own
    allowed_hosts: tuple[str, ...]  # of Host; (): those of this machine, or any where it is public
    cors_origins: tuple[str, ...]  # pages whose scripts may ask
    # Sequences that are computed together: cache slots; auto: as many as fit, up to 8
    max_running: Count | Literal["auto"]
    max_queue: Index  # sequences that wait; more are refused
    # Tokens of a prompt and its completion; null: the model's context, auto: as much of it as fits
    max_length: Count | Literal["auto"] | None
    priority: bool  # requests may ask to be taken earlier than others
    token_budget: Count | None  # of a step; null: the backend's preference
    tool_parser: ToolParser | Literal["auto"]  # format of tool calls; auto: by its template
    pooling: Pooling | Literal["auto"]  # of hidden states, for embeddings
    load_adapters: bool  # clients may load and unload adapters below adapter_root
    watch_adapters: InputPath  # a folder whose adapters come and go with their folders; "": none
    # Of adapters that come later; null: 16, or the sizes of those of adapter_path
    max_lora_rank: Count | None
    request_timeout: Positive  # seconds
    drain_delay: NotNegative  # seconds after SIGTERM in which requests are still taken
    drain_timeout: Positive  # seconds for running requests after that
    log_format: Literal["text", "json"]
    request_log: OutputPath  # requests and their seeds, to be replayed by `batch`; "": none

    @property
    def is_public(self) -> bool:
        """True if other machines reach it."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def behind(self) -> Serve:
        """The settings of a server behind another process of ours, which answers for it."""
        return replace(self, api_key="", tls_cert="", tls_key="", drain_delay=0)

    @property
    def batch_target(self) -> Path:
        """The file of answers to a batch."""
        batch = Path(self.batch)
        return Path(self.batch_output or batch.with_name(f"{batch.stem}_output.jsonl"))

    @property
    def takes_adapters(self) -> bool:
        """True if adapters come while it runs."""
        return self.load_adapters or bool(self.watch_adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """Names for the model; (): its own."""
        given = self.model_name
        return (given,) if isinstance(given, str) else given or ()

    def errors(self) -> Iterator[Invalid]:
        """Settings that contradict each other, and names that would never match."""
        if self.engine == "local" and self.replicas > 1:
            yield invalid(
                "serve.replicas",
                f"serve.replicas={self.replicas} needs serve.engine=ray, which runs replicas"
                " on a Ray cluster",
            )
        for key in ("requests_per_minute", "tokens_per_minute"):
            if self.engine == "ray" and getattr(self, key) is not None:
                yield invalid(
                    f"serve.{key}",
                    f"serve.{key} needs serve.engine=local: each replica would count its own",
                )
        yield from size_errors("serve.memory", self.memory)
        for key, given in (
            ("serve.engine", self.engine == "ray"),
            ("serve.batch", self.batch),
            ("serve.load_adapters", self.load_adapters),
            ("serve.model_name", self.model_name is not None),
        ):
            if self.models and given:
                yield invalid(key, f"{key} needs a single model: leave serve.models out")
        if self.engine == "ray" and self.batch:
            yield invalid("serve.batch", "serve.batch needs serve.engine=local")
        if self.batch_output and not self.batch:
            yield invalid("serve.batch_output", "serve.batch_output needs serve.batch=FILE")
        if self.watch_adapters and (self.engine == "ray" or self.batch):
            other = "serve.batch= has" if self.batch else "replicas on a Ray cluster have"
            yield invalid(
                "serve.watch_adapters",
                f"serve.watch_adapters: {other} the adapters of adapter_path= alone",
            )
        watched = self.watch_adapters
        if watched and "\0" not in watched and not Path(watched).expanduser().is_dir():
            yield invalid(
                "serve.watch_adapters",
                f"serve.watch_adapters: no folder {watched}; make it, or give another one",
            )
        if self.max_lora_rank is not None and not self.takes_adapters:
            yield invalid(
                "serve.max_lora_rank",
                f"serve.max_lora_rank={self.max_lora_rank} has an effect only with"
                " serve.watch_adapters= or serve.load_adapters=true",
            )
        if self.is_public and not self.api_key:
            yield invalid(
                ("serve.host", "serve.api_key"),
                f"serve.host={self.host} can be reached from other machines, which needs"
                " serve.api_key=env:NAME (or a file that holds the key); or serve.host=127.0.0.1",
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            yield invalid(
                ("serve.tls_cert", "serve.tls_key"),
                "serve.tls_cert and serve.tls_key, PEM files of a certificate and its key, need"
                " each other",
            )
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                yield invalid(
                    "serve.cors_origins",
                    f"serve.cors_origins: got {show(origin)}, expected SCHEME://HOST[:PORT]"
                    " without a path, such as http://localhost:3000, or '*'",
                )
        for host in self.allowed_hosts:
            if host != "*" and not _HOST.fullmatch(host):
                yield invalid(
                    "serve.allowed_hosts",
                    f"serve.allowed_hosts: got {show(host)}, expected a name without a port,"
                    " such as llm.example.com or '*.example.com', or '*'",
                )
        names = self.names
        for name in names:
            if not name or names.count(name) > 1:
                yield invalid(
                    "serve.model_name", f"serve.model_name: {show(name)} is empty or twice"
                )
        if self.model_name == ():
            yield invalid("serve.model_name", "serve.model_name: no name; null is the model's own")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(SessionOptions):
    """A server of one model and its adapters; sampling keys are the defaults of requests."""

    batch_key: ClassVar[str] = "serve.max_running"
    length_key: ClassVar[str] = "serve.max_length"

    prefix_cache: PrefixCache
    serve: Serve

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may give for the base model; answers give the first."""
        return self.serve.names or (self.model_name,)

    @property
    def adapters(self) -> AdapterSource:
        """The initial adapters, and the room for others."""
        rank = self.serve.max_lora_rank or (0 if self.adapter_path else LATER_RANK)
        return replace(super().adapters, later_rank=rank if self.serve.takes_adapters else 0)

    @property
    def takes_adapters(self) -> bool:
        return super().takes_adapters or self.serve.takes_adapters

    @property
    def log_format(self) -> Literal["text", "json"]:
        return self.serve.log_format


@dataclass(frozen=True, kw_only=True)
class ServePlan(Plan):
    """A resolved server of one model."""

    serve: Serve
    names: tuple[str, ...]  # that requests may give for the base model; answers give the first
