"""The plan of a job in one process, and of a model and its adapters for prompts that come later."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from lite_runner import progress
from lite_runner.config.schema import ComputeOptions, SessionOptions
from lite_runner.errors import ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate_for_plan, tokenizer_for_plan
from lite_runner.plan import Job, Plan, with_ends
from lite_runner.plan.resources import (
    check_before_fetching,
    fitted,
    fitted_text,
    lengths_of,
    resolve_backend,
    run_options,
    with_resources,
)
from lite_runner.system import environment
from lite_runner.text.tokenizer import Tokenizer


def planned(
    config: ComputeOptions,
    files: ModelFiles,
    job: Job,
    device: str,
    tokenizer: Tokenizer | None,
    *,
    began: float,
    lines: Mapping[str, str] = MappingProxyType({}),
    slots: Sequence[int] = (),
    lengths: Sequence[int] = (),
    least: int = 1,
) -> Plan:
    """The plan of a job in one process, begun at a time.perf_counter(): its backend, its memory,
    and the largest of `slots` and `lengths` that fit, see `fitted`; with neither the job's own.
    Raises RunnerError.
    """
    options = resolve_backend(files, run_options(config.settings, job, device))
    config = replace(config, backend=options.settings.backend)
    sized = fitted(files, options, slots or [job.slots], lengths or [job.length], least)
    if (sized.slots, sized.length) != (job.slots, job.length):
        chosen = fitted_text(sized, options)
        lines = {**lines, "chosen": chosen}
        if not config.dry_run:
            progress.note(f"note: memory: {chosen}")
        job = replace(job, slots=sized.slots, length=sized.length)
    plan = Plan(
        config=config, device=device, files=files, job=job, lines=dict(lines), tokenizer=tokenizer
    )
    return replace(with_resources(plan, job), seconds=time.perf_counter() - began)


def plan_session(
    config: SessionOptions,
    *,
    slots: Sequence[int],
    length: int | Literal["auto"] | None,
    least: int = 1,
    all_logits: bool = False,
) -> Plan:
    """Files, tokenizer, every adapter, backend and memory, all validated.

    `slots`: sequences at a time, the most of these that fit the memory; `length`: tokens of each
    (None: the model's context; "auto": as much of it as fits with `least` sequences);
    `all_logits`: prompts may have log-probabilities. With dry_run=true nothing is fetched. Raises
    RunnerError.
    """
    from lite_runner.model.adapters import all_adapters

    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    if (fetched := check_before_fetching(config.settings)) is not None:
        all_adapters(config.adapters, fetched.model)
    files = locate_for_plan(config.source)
    context = files.model.seq_length
    if length is not None and length != "auto" and length > context:
        raise ConfigError(
            f"{config.length_key}: got {length}, expected at most the model's context of {context}"
        )
    manifest = None if files.exported is None else files.exported.manifest
    longest = context if manifest is None else min(context, manifest.seq_length)
    lengths = lengths_of(longest) if length == "auto" else [length or context]
    if manifest is not None and not manifest.fits_any:
        slots = [rows for rows in slots if rows <= manifest.batch_size] or slots
        lengths = lengths[:1]
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    if tokenizer is not None and not config.dry_run:
        tokenizer.complete()
    generation = replace(config.generation(files.model), max_length=None)
    generation = with_ends(generation, config.eos_token_id, files.model, tokenizer)
    adapters = all_adapters(config.adapters, files.model)
    if adapters is not None:
        adapters.check(files)
    job = Job((), (), generation, slots[-1], lengths[0], adapters=adapters, all_logits=all_logits)
    return planned(
        *(config, files, job, device, tokenizer),
        began=began,
        slots=slots,
        lengths=lengths,
        least=least,
    )
