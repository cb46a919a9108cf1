"""Plans of runs that generate text: prompts of the config, or of a later session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lite_runner import progress
from lite_runner.backends.seat import RunOptions
from lite_runner.config.checks import check_fits
from lite_runner.config.generation import without_effect
from lite_runner.config.parallel import check_divides, ranks_of
from lite_runner.config.prompt import items_of
from lite_runner.config.prompts import prompt_file, read_requests
from lite_runner.config.schema import GenerateOptions, SessionOptions
from lite_runner.errors import ConfigError
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import end_tokens, tokenizer_for_plan
from lite_runner.plan.backend import resolve_backend, run_options
from lite_runner.plan.job import Job, estimate, grammars_of, prepare
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import (
    check_before_fetching,
    fitted,
    fitted_text,
    lengths_of,
    options_of,
    with_resources,
)
from lite_runner.sizing.memory import model_lines
from lite_runner.system import environment

LEAST_NEW = 128  # tokens that a prompt's completion may have, however little memory is free


def plan_generation(config: GenerateOptions, tokens: Sequence[list[int]] | None = None) -> Plan:
    """Files, token ids, backend and memory, all validated; `tokens`: of a rank whose first one has
    made the same plan, with the token ids of all prompts. Raises RunnerError.

    With dry_run=true nothing is fetched; without a tokenizer a prompt counts its bytes as tokens.
    """
    began = time.perf_counter()
    if config.only_save_strategy:
        return plan_of_strategy(config)
    plan = _planned_inputs(config, tokens)
    assert isinstance(plan.config, GenerateOptions)
    config, files, job, ranks = plan.config, plan.model, plan.work, plan.ranks
    tell = config.parallel.node_rank == 0  # one machine says it for all
    options = options_of(plan)
    config = resolve_backend(config, files, options, tell=tell)
    if ranks.size == 1:
        config, job = _fitted(config, files, job, options)
    first = job.share(ranks)  # the first replica has the most prompts
    if ranks.size > 1 and not config.in_lite and not config.dry_run:
        files.check_layout(ranks, vocab_parallel=config.vocab_parallel)
    plan = replace(plan, config=config, job=job)
    return replace(with_resources(plan, first), seconds=time.perf_counter() - began)


def _fitted(
    config: GenerateOptions, files: ModelFiles, job: Job, options: RunOptions
) -> tuple[GenerateOptions, Job]:
    """The config and the job with the sizes that nobody has given reduced to what fits the free
    memory: the batch; and the length where only the model's own limit says how long a text gets."""
    each, shared = job.options, job.generation
    width = max(shared.num_beams, shared.num_return_sequences)
    slots = range(width, job.slots + 1, width)
    lengths = [job.length]
    given = config.max_new_tokens or config.max_length
    if not given and all(one.max_new_tokens == shared.max_new_tokens for one in each):
        prompt = max(map(len, job.tokens))
        lengths = lengths_of(job.length, min(job.length, prompt + LEAST_NEW))
    if config.predict_batch_size is not None:
        slots = slots[-1:]
    options = replace(options, config=config)
    sized = fitted(files, options, slots, lengths)
    if (sized.slots, sized.length) == (job.slots, job.length):
        return config, job
    progress.note(f"note: memory: {fitted_text(sized, options)}")
    config = replace(config, predict_batch_size=sized.slots // width)
    batch = sized.slots // width
    return config, replace(job, slots=sized.slots, length=sized.length, batch=batch)


def _planned_inputs(config: GenerateOptions, tokens: Sequence[list[int]] | None) -> Plan:
    """The plan as far as it goes before a backend is chosen. With several ranks its config holds
    the prompts, for the other ranks."""
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    ranks = ranks_of(config)
    data = config.predict_data
    if config.dry_run:  # without prompts: the plan for a short one
        data = data or " "
    lines = config.adapter_lines and prompt_file(data) is not None  # which have their adapters
    if config.adapter_path and not lines:
        from lite_runner.model.adapters import only_adapter  # not for runs without

        if (only := only_adapter(config)) is not None:
            config = replace(config, adapter_id=only)
    requests = read_requests(replace(config, predict_data=data))
    for idle in dict.fromkeys(without_effect(request.own) for request in requests):
        if idle:
            progress.note(f"prompts with options of their own: {idle}")
    grammars_of(config, requests, len(requests))  # told before anything is fetched
    if ranks.size > 1:
        names = tuple(request.adapter for request in requests) if config.adapter_path else None
        adapters = config.adapter_id if names is None else names
        config = replace(config, adapter_id=adapters, predict_data=items_of(requests))
    elif config.adapter_path and not any(request.adapter for request in requests):
        progress.note(f"adapter_path={config.adapter_path}: adapter_id= names none, the base runs")
    if (planned := check_before_fetching(config)) is not None:
        estimate(config, planned, requests)  # adapters are read
    files = locate_for_plan(config)
    check_divides(config, files.model)
    tokenizer = tokenizer_for_plan(config, files)
    if tokenizer is None:
        job = estimate(config, files, requests)
    else:
        job = prepare(config, files, tokenizer, requests, tokens)
    return Plan(
        config=config, device=device, ranks=ranks, files=files, job=job, tokenizer=tokenizer
    )


def plan_of_strategy(config: GenerateOptions) -> Plan:
    """The ranks and the model's sizes. Raises RunnerError."""
    files = None if config.model_config() else locate_for_plan(config)
    plan = Plan(config=config, ranks=ranks_of(config), files=files)
    check_fits(config, plan.decoder)
    source = files.location() if files else config.checkpoint_source
    writes = {"writes": f"the strategy of {plan.ranks.size} ranks"}
    return replace(plan, lines=model_lines(config, plan.decoder, source) | writes)


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
    if (planned := check_before_fetching(config)) is not None:
        all_adapters(config, planned.model)
    files = locate_for_plan(config)
    context = files.model.seq_length
    if length is not None and length != "auto" and length > context:
        raise ConfigError(
            f"{config.length_key}: got {length}, expected at most the model's context of {context}"
        )
    made = None if files.exported is None else files.exported.manifest
    longest = context if made is None else min(context, made.seq_length)
    lengths = lengths_of(longest) if length == "auto" else [length or context]
    if made is not None and not made.fits_any:
        slots = [rows for rows in slots if rows <= made.batch_size] or slots
        lengths = lengths[:1]
    tokenizer = tokenizer_for_plan(config, files)
    generation = replace(config.generation(files.model), max_length=None)
    if config.eos_token_id is None and tokenizer is not None:
        generation = replace(generation, eos_token_id=end_tokens(files.model, tokenizer))
    adapters = all_adapters(config, files.model)
    if adapters is not None:
        adapters.check(files)
    job = Job((), (), generation, slots[-1], lengths[0], adapters=adapters, all_logits=all_logits)
    options = run_options(config, job, device)
    config = resolve_backend(config, files, options)
    options = replace(options, config=config)
    sized = fitted(files, options, slots, lengths, least)
    lines = {}
    if (sized.slots, sized.length) != (job.slots, job.length):
        lines["chosen"] = chosen = fitted_text(sized, options)
        if not config.dry_run:
            progress.note(f"note: memory: {chosen}")
        job = replace(job, slots=sized.slots, length=sized.length)
    plan = Plan(
        config=config,
        device=device,
        files=files,
        job=job,
        lines=lines,
        tokenizer=tokenizer,
    )
    return replace(with_resources(plan, job), seconds=time.perf_counter() - began)
