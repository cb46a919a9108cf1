"""The plan of a run: everything that is resolved before weights are read.

A run mode makes and validates it; dry_run=true prints it, ranks receive it as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, replace
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.model.files import ModelFiles
from lite_runner.plan.job import Job
from lite_runner.plan.plain import files_from_plain, files_to_plain, job_from_plain, job_to_plain
from lite_runner.records import dataclass
from lite_runner.sizing.need import Memory, align
from lite_runner.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved run."""

    config: RunConfig
    device: str = "CPU"  # or "Ascend"
    backend: str = ""  # "ms", "mslite" or "mindformers" of runs that compute, never "auto"
    why: str = ""  # the operators, and the reason for them
    dtype: str = ""  # of the weights in memory, as text
    ranks: Ranks = Ranks()
    files: ModelFiles | None = None  # the opened checkpoint, or exported model
    job: Job | None = None  # prompts as token ids, their options and adapters
    memory: Memory | None = None  # of one rank
    lines: Mapping[str, str] = field(default_factory=dict)  # of dry_run, by label
    table: tuple[str, ...] = ()  # printed after them
    # Of this process alone: the opened tokenizer, and how long planning took.
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
        return "\n".join([*align(self.lines), *self.table]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which `from_dict` reads."""
        return {
            "config": self.config.to_dict(),
            "device": self.device,
            "backend": self.backend,
            "why": self.why,
            "dtype": self.dtype,
            "ranks": asdict(self.ranks),
            "files": self.files and files_to_plain(self.files),
            "job": self.job and job_to_plain(self.job),
            "memory": self.memory and asdict(self.memory),
            "lines": dict(self.lines),
            "table": list(self.table),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], config: RunConfig) -> Plan:
        """The plan of `to_dict`, given its config; prompts are not tokenized again. Raises
        ArtifactError where a file is missing."""
        files = raw["files"] and files_from_plain(raw["files"], config)
        memory = raw["memory"]
        return cls(
            config=config,
            device=raw["device"],
            backend=raw["backend"],
            why=raw["why"],
            dtype=raw["dtype"],
            ranks=Ranks(**raw["ranks"]),
            files=files,
            job=job_from_plain(raw["job"], config, files) if raw["job"] and files else None,
            memory=memory and Memory(**memory),
            lines=raw["lines"],
            table=tuple(raw["table"]),
        )

    def verified(self, ranks: Iterable[int]) -> Plan:
        """The plan for ranks that need not verify the shards which they read: that is done here,
        each shard once. Raises ArtifactError."""
        if self.files is None:
            return self
        every = [self.of_rank(rank).ranks for rank in ranks]
        files = self.files.verify(every, vocab_parallel=self.config.vocab_parallel)
        return replace(self, files=files)

    def of_rank(self, rank: int) -> Plan:
        """The plan as one of its ranks runs it."""
        return replace(self, ranks=replace(ranks_of(self.config), rank=rank))
