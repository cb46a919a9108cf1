"""A run resolved once: all that is decided before a weight is read.

It is made and checked by the run mode, printed by dry_run=true, handed to ranks as JSON, and run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lite_runner.architectures.plain import from_plain, to_plain
from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import ranks_of
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions, GenerateOptions
from lite_runner.config.prompt import Request
from lite_runner.config.quantization import Quantization
from lite_runner.config.ranks import Ranks
from lite_runner.config.requests import read_requests
from lite_runner.config.schema import RunConfig
from lite_runner.model import model_files
from lite_runner.model.adapters import open_wanted
from lite_runner.model.model_files import ModelFiles
from lite_runner.plan.job import Job
from lite_runner.sizing.need import Memory, aligned
from lite_runner.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does, with what, where."""

    config: RunConfig
    device: str = "CPU"  # or "Ascend"
    backend: str = ""  # ms or mslite, of runs that compute; backend=auto is decided
    why: str = ""  # this backend, and these operators
    dtype: str = ""  # what the weights are held as
    ranks: Ranks = Ranks()  # noqa: RUF009  (frozen)
    files: ModelFiles | None = None  # the opened checkpoint, or exported model
    job: Job | None = None  # prompts as token ids, their options and adapters
    memory: Memory | None = None  # of one rank
    lines: Mapping[str, str] = field(default_factory=dict)  # of dry_run, by name
    table: tuple[str, ...] = ()  # behind them
    # Of this process alone: what was opened on the way, and how long it took.
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def model(self) -> ModelFiles:
        """The files of a plan that has some."""
        assert self.files is not None
        return self.files

    @property
    def decoder(self) -> Decoder:
        """The model's sizes: those of the config, or where it has none its files'."""
        return self.config.model_config() or self.model.model

    @property
    def work(self) -> Job:
        """The job of a plan that has one."""
        assert self.job is not None
        return self.job

    @property
    def writes_graphs(self) -> bool:
        """Whether it writes an exported model."""
        return isinstance(self.config, ExportedOptions) and self.config.writes_graphs

    def text(self) -> str:
        """What dry_run=true prints."""
        return "\n".join([*aligned(self.lines), *self.table]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads an equal plan from it, with its files opened anew
        where they are an exported model or have an adapter merged."""
        return {
            "config": self.config.to_dict(),
            "device": self.device,
            "backend": self.backend,
            "why": self.why,
            "dtype": self.dtype,
            "ranks": asdict(self.ranks),
            "files": self.files and _files_to_plain(self.files),
            "job": self.job and _job_to_plain(self.job),
            "memory": self.memory and asdict(self.memory),
            "lines": dict(self.lines),
            "table": list(self.table),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], config: RunConfig) -> Plan:
        """The plan of `to_dict`, whose config has been read; nothing is tokenized again. Raises
        ArtifactError where a file is gone."""
        files = raw["files"]
        if files == REOPENED:
            opened: ModelFiles | None = model_files.locate(config)
        else:
            opened = files and _files_from_plain(files)
        memory = raw["memory"]
        return cls(
            config=config,
            device=raw["device"],
            backend=raw["backend"],
            why=raw["why"],
            dtype=raw["dtype"],
            ranks=Ranks(**raw["ranks"]),
            files=opened,
            job=_job_from_plain(raw["job"], config, opened) if raw["job"] and opened else None,
            memory=memory and Memory(**memory),
            lines=raw["lines"],
            table=tuple(raw["table"]),
        )

    def of_rank(self, rank: int) -> Plan:
        """The same, seen from one of the ranks."""
        return replace(self, ranks=replace(ranks_of(self.config), rank=rank))


REOPENED = "opened by each rank"  # in place of the files


def _files_to_plain(files: ModelFiles) -> dict[str, Any] | str:
    if files.given is not None or files.adapter is not None:
        return REOPENED
    return {
        "source": files.source,
        "path": None if files.path is None else str(files.path),
        "model": to_plain(files.model),
        "seed": files.seed,
        "strategy": None if files.strategy is None else str(files.strategy),
        "auto_trans": files.auto_trans,
        "quantization": asdict(files.quantization),
    }


def _files_from_plain(raw: Mapping[str, Any]) -> ModelFiles:
    return ModelFiles(
        raw["source"],
        None if raw["path"] is None else Path(raw["path"]),
        from_plain(raw["model"]),
        raw["seed"],
        strategy=None if raw["strategy"] is None else Path(raw["strategy"]),
        auto_trans=raw["auto_trans"],
        quantization=Quantization(**raw["quantization"]),
    )


def _job_to_plain(job: Job) -> dict[str, Any]:
    return {
        "tokens": [list(map(int, ids)) for ids in job.tokens],
        "generation": asdict(job.generation),
        "slots": job.slots,
        "length": job.length,
        "adapters": None if job.adapters is None else list(job.adapters.of_prompts),
        "scores": job.scores,
    }


def _job_from_plain(raw: Mapping[str, Any], config: RunConfig, files: ModelFiles) -> Job:
    generation: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in raw["generation"].items()
    }
    requests: tuple[Request, ...] = ()
    adapters = None
    if isinstance(config, GenerateOptions):
        requests = tuple(read_requests(config))
        if raw["adapters"] is not None:
            adapters = open_wanted(config, files.model, raw["adapters"])
    return Job(
        requests,
        raw["tokens"],
        GenerationConfig(**generation),
        raw["slots"],
        raw["length"],
        adapters=adapters,
        scores=raw["scores"],
    )
