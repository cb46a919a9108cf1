"""Whether the model that a config names could run here: its files, tokenizer, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import (
    BatchOptions,
    ExportedOptions,
    MindFormersOptions,
    SamplingOptions,
)
from lite_runner.doctor.check import Check, Finding
from lite_runner.generation import max_sequence_of
from lite_runner.model.locate import locate_cached
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.plan.job import Job, slots_for
from lite_runner.plan.memory import job_memory, memory_hints
from lite_runner.plan.preflight import check_machine
from lite_runner.records import dataclass
from lite_runner.sizing.need import check_memory, readable
from lite_runner.system import environment, memory

FETCHED = "a run fetches it"
_SAMPLE = "The capital of France is"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SamplingOptions, BatchOptions, ExportedOptions, MindFormersOptions):
    """What of a config says which model is meant, and what a run of it would take."""

    on_ranks: ClassVar[bool] = False


def checks(config: ModelOptions) -> Iterator[Check]:
    """Of the model of `config`; nothing is fetched, and of weights only the headers are read."""
    yield Check("model files", partial(files, config))
    yield Check("tokenizer", partial(tokenizer, config))
    yield Check("model memory", partial(needs, config))


def files(config: ModelOptions) -> Finding:
    """Whether all tensors are there, in the shapes of the model."""
    found = locate_cached(config)
    if not found.is_here:
        return Finding("warn", f"{found.source}: not here yet", remedy=FETCHED)
    if found.exported is not None:
        return Finding("ok", found.location())
    tensors = found.resharded(ranks_of(config), vocab_parallel=config.vocab_parallel)
    return Finding("ok", f"{found.location()}, {len(tensors)} tensors, none missing")


def tokenizer(config: ModelOptions) -> Finding:
    """Whether it loads, and gives back a text that it has encoded."""
    found = locate_cached(config)
    if not found.is_here:
        return Finding("warn", "not here yet", remedy=FETCHED)
    loaded = tokenizer_of(config, found, fetching=False)
    ids = loaded.encode(_SAMPLE)
    if (back := loaded.decode(ids).strip()) != _SAMPLE:
        return Finding("warn", f"{loaded.source}: gives back {back!r}", repr(_SAMPLE))
    template = "with" if loaded.has_chat_template else "without"
    return Finding("ok", f"{loaded.source}: {loaded.vocab_size} tokens, {template} a chat template")


def needs(config: ModelOptions) -> Finding:
    """What a run with a short prompt, the config's batch and its new tokens would take, against
    what there is."""
    device = environment.resolve_device(config.context.device_target)
    ranks, found = ranks_of(config), locate_cached(config)
    generation, context = config.generation(found.model), found.model.seq_length
    length = min(context, max_sequence_of([1], [generation], context))
    slots = slots_for(config, generation, config.predict_batch_size or 1)
    job = Job((), [()], generation, slots, length)
    need = job_memory(config, found, job, device, ranks)

    hints = partial(memory_hints, config, found, job, device, ranks)
    if config.use_parallel:
        check_machine(config, need, hints)
    elif device == "CPU":
        check_memory(need, hints)
    has = f", {readable(memory.free_memory())} is free" if device == "CPU" else ""
    each = " in each rank" if config.use_parallel else ""
    told = f"needs {readable(need.total)}{each} for {slots} x {length} tokens ({need.parts()}){has}"
    return Finding("ok", told)
