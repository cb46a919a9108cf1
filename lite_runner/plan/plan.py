"""The plan of a run: everything that is resolved before weights are read.

A run mode makes and validates it; dry_run=true prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

from lite_runner.architectures.spec import Decoder
from lite_runner.config.parallel import Ranks, cluster_of, ranks_of
from lite_runner.config.schema import ExportedOptions, RunConfig
from lite_runner.model.files import ModelFiles
from lite_runner.plan.job import Job
from lite_runner.records import dataclass
from lite_runner.sizing.memory import (
    Memory,
    MemoryHint,
    align,
    memory_lines,
    model_lines,
    ranks_plan,
    readable,
)
from lite_runner.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved run."""

    config: RunConfig
    device: str = "CPU"  # or "Ascend"
    why: str = ""  # the operators, and the reason for them
    dtype: str = ""  # of the weights in memory, as text
    ranks: Ranks = Ranks()
    files: ModelFiles | None = None  # the opened checkpoint, or exported model
    job: Job | None = None  # prompts as token ids, their options and adapters
    memory: Memory | None = None  # of one rank
    lines: Mapping[str, str] = field(default_factory=dict)  # of dry_run, by label
    table: tuple[str, ...] = ()  # printed after them
    # The opened tokenizer, and how long planning took.
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
        """True for a run that writes an exported model."""
        return isinstance(self.config, ExportedOptions) and self.config.writes_graphs

    def text(self) -> str:
        """The text of dry_run=true."""
        return "\n".join([*align(self.lines), *self.table]) + "\n"

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


def described(plan: Plan, hints: Callable[[], Sequence[MemoryHint]] = list) -> Plan:
    """The plan with the lines of dry_run=true; `hints` is called where memory does not suffice."""
    config, model, job, need = plan.config, plan.model.model, plan.work, plan.memory
    assert need is not None
    each = " in each rank" if config.use_parallel else ""
    cache = need.cache + need.more_cache
    lines = model_lines(config.run_mode, config.model_name, model, plan.model.location()) | {
        "weights": f"{readable(need.weights)} as {plan.dtype}{each}",
        "cache": f"{readable(cache)} for {job.slots} x {job.length} tokens{each}"
        if config.use_past
        else "none (use_past=false)",
    }
    if need.adapters:
        lines["adapters"] = f"{readable(need.adapters)} for those loaded at a time"
    if not need.process:
        lines["memory"] = f"needs {readable(need.total)} on each device; what one has is not known"
    elif not config.use_parallel:
        lines |= memory_lines(need, hints)
    lines["backend"] = f"{config.backend}: {plan.why}" if plan.why else config.backend
    lines |= {
        "device": plan.device,
        "ranks": str(plan.ranks.size),
        "output": config.output_dir,
    }
    table: tuple[str, ...] = ()
    if config.use_parallel and config.on_ranks and not plan.writes_graphs:
        table = tuple(
            ranks_plan(
                cluster_of(config),
                model,
                need,
                device=plan.device,
                slots=job.slots,
                length=job.length,
                use_past=config.use_past,
                vocab_parallel=config.vocab_parallel,
            )
        )
    return replace(plan, lines={**lines, **plan.lines}, table=table)
