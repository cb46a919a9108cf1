"""The plan of a run that generates texts: prompts as token ids, what computes, what it takes."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from lite_runner.config.options import GenerateOptions
from lite_runner.plan import footprint
from lite_runner.plan.describe import described
from lite_runner.plan.inputs import read_inputs
from lite_runner.plan.job import share
from lite_runner.plan.loading import with_backend
from lite_runner.plan.memory import memory_levers, memory_need
from lite_runner.plan.operators import check_supported, operators_of
from lite_runner.plan.plan import Plan
from lite_runner.plan.preflight import check_machine
from lite_runner.plan.strategy import plan_of_strategy
from lite_runner.system import environment


def plan_generation(config: GenerateOptions) -> Plan:
    """Files, prompts as token ids, backend and memory, all checked. With dry_run=true nothing is
    fetched: without a tokenizer prompts are counted by their bytes, no token being shorter. Raises
    RunnerError."""
    began = time.perf_counter()
    if config.only_save_strategy:
        return plan_of_strategy(config)
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    inputs = read_inputs(config)
    files, job, ranks = inputs.files, inputs.job, inputs.ranks
    config = with_backend(inputs.config, files, job)
    first = share(config, job, ranks)  # the first copy has the most prompts
    online = files.given is None and config.backend == "ms"
    if online and ranks.size > 1 and not config.dry_run:
        check_supported(config, files, device, ranks)
        files.tensors(ranks, vocab_parallel=config.vocab_parallel)

    levers = partial(memory_levers, config, files, first, device, ranks)
    planned = Plan(
        config=config,
        device=device,
        backend=config.backend,
        why=operators_of(config, files, device, ranks) if online else "",
        dtype=footprint.dtype_of_plan(config, files, device, ranks),
        ranks=ranks,
        files=files,
        job=job,
        memory=memory_need(config, files, first, device, ranks),
        tokenizer=inputs.tokenizer,
    )
    if config.dry_run:
        return described(replace(planned, job=first), levers)
    if ranks.size > 1:
        assert planned.memory is not None
        check_machine(config, planned.memory, levers)
    return replace(planned, seconds=time.perf_counter() - began)
