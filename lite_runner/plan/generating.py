"""The plan of a run that generates texts: prompts as token ids, what computes, what it takes."""

from __future__ import annotations

import time
from dataclasses import replace

from lite_runner import progress
from lite_runner.config.cluster import ranks_of
from lite_runner.config.fields import raise_faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.parallel import division_faults
from lite_runner.config.prompt import items_of
from lite_runner.config.requests import read_requests
from lite_runner.model import model_files
from lite_runner.plan import footprint
from lite_runner.plan.describe import described
from lite_runner.plan.operators import check_supported, operators_of
from lite_runner.plan.plan import Plan
from lite_runner.plan.preflight import check_machine
from lite_runner.plan.session import (
    estimate,
    memory_levers,
    memory_need,
    prepare,
    share,
    with_backend,
)
from lite_runner.sizing.need import Lever, about_model
from lite_runner.system import environment


def plan_generation(config: GenerateOptions) -> Plan:
    """Files, prompts as token ids, backend and memory, all checked. With dry_run=true nothing is
    fetched: without a tokenizer prompts are counted by their bytes, no token being shorter. Raises
    RunnerError."""
    began = time.perf_counter()
    if config.only_save_strategy:
        return _plan_of_strategy(config)
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    ranks = ranks_of(config)
    asked = config
    if config.dry_run:  # without prompts it is the plan for a short one
        asked = replace(config, predict_data=config.predict_data or " ")
    requests = read_requests(asked)
    if ranks.size > 1:  # each reads what this process has read
        names = tuple(request.adapter for request in requests) if config.adapter_path else None
        adapters = config.adapter_id if names is None else names
        config = replace(config, adapter_id=adapters, predict_data=items_of(requests))
    elif config.adapter_path and not any(request.adapter for request in requests):
        progress.note(f"adapter_path={config.adapter_path}: adapter_id= names none, the base runs")
    files = model_files.find(config)
    raise_faults(list(division_faults(config, files.model)))
    tokenizer = model_files.found_tokenizer(config, files)
    if tokenizer is None:
        job = estimate(config, files, requests)
    else:
        job = prepare(config, files, tokenizer, requests)
    config = with_backend(config, files, job)
    first = share(config, job, ranks)  # the first copy has the most prompts
    online = files.given is None and config.backend == "ms"
    if online and ranks.size > 1 and not config.dry_run:
        check_supported(config, files, device, ranks)
        files.tensors(ranks, vocab_parallel=config.vocab_parallel)

    def levers() -> list[Lever]:
        return memory_levers(config, files, first, device, ranks)

    # What a file holds is looked up for those who want to read it.
    held: str = config.compute_dtype(device)
    if config.dry_run:
        held = footprint.held_as(config, files, device, ranks)
    planned = Plan(
        config=config,
        device=device,
        backend=config.backend,
        why=operators_of(config, files, device, ranks) if online else "",
        dtype=held,
        ranks=ranks,
        files=files,
        job=job,
        memory=memory_need(config, files, first, device, ranks),
        tokenizer=tokenizer,
    )
    if config.dry_run:
        return described(replace(planned, job=first), levers)
    if ranks.size > 1:
        assert planned.memory is not None
        check_machine(config, planned.memory, levers)
    return replace(planned, seconds=time.perf_counter() - began)


def _plan_of_strategy(config: GenerateOptions) -> Plan:
    """only_save_strategy=true: of the sizes alone."""
    model = config.model_config()
    files = None if model else model_files.find(config)
    model = model or (files.model if files else None)
    assert model is not None
    raise_faults(list(division_faults(config, model)))
    ranks = ranks_of(config)
    source = files.whereabouts() if files else config.checkpoint_source
    lines = about_model(config, model, source) | {"writes": f"the strategy of {ranks.size} ranks"}
    return Plan(config=config, ranks=ranks, files=files, lines=lines)
