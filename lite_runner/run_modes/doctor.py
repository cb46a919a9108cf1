"""run_mode=doctor: checks of this machine, and of the model that is named."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from lite_runner.backends.mindformers.releases import choose_release
from lite_runner.config import Invalid
from lite_runner.config.schema import (
    BatchOptions,
    ExportedOptions,
    MindFormersOptions,
    SamplingOptions,
)
from lite_runner.doctor import machine
from lite_runner.doctor.check import Check, Finding
from lite_runner.errors import EnvironmentFault
from lite_runner.generation import max_sequence_of
from lite_runner.model.locate import locate_cached, tokenizer_of
from lite_runner.plan import Job, Plan, slots_for
from lite_runner.plan.resources import check_machine, job_memory, memory_hints, run_options
from lite_runner.records import dataclass
from lite_runner.sizing import check_memory
from lite_runner.system import environment, memory
from lite_runner.system.files import readable

FETCHED = "a run fetches it"
_SAMPLE = "The capital of France is"


@dataclass(frozen=True, kw_only=True)
class Config(SamplingOptions, BatchOptions, ExportedOptions, MindFormersOptions):
    """run_mode=doctor"""

    on_ranks: ClassVar[bool] = False
    leaves_folder: ClassVar[bool] = False

    output_format: Literal["text", "json"]

    @property
    def needs_checkpoint(self) -> bool:
        """model=auto, the default here, is no model unless a checkpoint is named."""
        return False

    @property
    def names_model(self) -> bool:
        """True if a model is named, typed or in a file."""
        named = self.checkpoint_source or self.model_config() or self.runs_given_model
        return bool(named)


def errors(config: Config) -> Iterator[Invalid]:
    """None: the checks report errors."""
    yield from ()


def checks(config: Config) -> Iterator[Check]:
    """Of the machine, and of the model where one is named."""
    output_dir = Path(config.output_dir).expanduser()
    limit = config.context.cache_limit
    yield from machine.machine_checks(output_dir, limit, needs_mindformers=config.in_mindformers)
    if config.names_model:
        yield from model_checks(config)


def model_checks(config: Config) -> Iterator[Check]:
    """Of the model; nothing is fetched, and of weights only the headers are read."""
    yield Check("model files", partial(_files, config))
    yield Check("tokenizer", partial(_tokenizer, config))
    yield Check("model memory", partial(_needs, config))
    if config.in_mindformers:
        yield Check("model in mindformers", partial(_release, config))


def plan(config: Config) -> Plan:
    """The checks by their names; none is run yet."""
    names = ", ".join(check.name for check in checks(config))
    return Plan(config=config, lines={"run mode": config.run_mode, "checks": names})


def run(plan: Plan, folder: None) -> None:
    """Run and print every check. Raises EnvironmentFault if one fails."""
    config = plan.config
    assert isinstance(config, Config)
    if not machine.run(checks(config), config.output_format):
        raise EnvironmentFault("not everything works here", "the lines after -> name the remedies")


def _files(config: Config) -> Finding:
    """All tensors exist, in the shapes of the model."""
    found = locate_cached(config.source)
    if not found.is_local:
        return Finding("warn", f"{found.source}: not downloaded yet", remedy=FETCHED)
    if found.exported is not None:
        return Finding("ok", found.location())
    tensors = found.resharded(config.ranks, vocab_parallel=config.vocab_parallel)
    return Finding("ok", f"{found.location()}, {len(tensors)} tensors, none missing")


def _tokenizer(config: Config) -> Finding:
    """The tokenizer loads, and decodes a text that it has encoded."""
    found = locate_cached(config.source)
    if not found.is_local:
        return Finding("warn", "not downloaded yet", remedy=FETCHED)
    loaded = tokenizer_of(config.tokenizer, found, fetching=False)
    ids = loaded.encode(_SAMPLE)
    if (back := loaded.decode(ids).strip()) != _SAMPLE:
        return Finding("warn", f"{loaded.source}: gives back {back!r}", repr(_SAMPLE))
    template = "with" if loaded.has_chat_template else "without"
    return Finding("ok", f"{loaded.source}: {loaded.vocab_size} tokens, {template} a chat template")


def _needs(config: Config) -> Finding:
    """The memory estimate of a run with a short prompt, the config's batch and its new tokens,
    against free memory."""
    device = environment.resolve_device(config.context.device_target)
    ranks, found = config.ranks, locate_cached(config.source)
    generation, context = config.generation(found.model), found.model.seq_length
    length = min(context, max_sequence_of([1], [generation], context))
    slots = slots_for(generation, config.predict_batch_size or 1, config.predict_batch_size)
    job = Job((), [()], generation, slots, length)
    options = run_options(config.settings, job, device, ranks)
    need, hints = job_memory(found, options), partial(memory_hints, found, options)
    if config.use_parallel:
        check_machine(config.cluster, device, need, hints)
    elif device == "CPU":
        check_memory(need, hints)
    has = f", {readable(memory.free_memory())} is free" if device == "CPU" else ""
    each = " in each rank" if config.use_parallel else ""
    text = f"needs {readable(need.total)}{each} for {slots} x {length} tokens ({need.parts()}){has}"
    return Finding("ok", text)


def _release(config: Config) -> Finding:
    """The release that computes the model of `config`. Raises ConfigError where none does."""
    release = choose_release(
        locate_cached(config.source).model,
        config.model_name,
        wanted=config.mindformers_release,
        use_past=config.caches,
        beams=config.num_beams or 1,
    )
    return Finding("ok", f"MindFormers {release.name}, on mindspore {release.mindspore}")
