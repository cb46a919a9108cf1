"""The plan of a run that generates texts: prompts as token ids, what computes, what it takes."""

from __future__ import annotations

import time
from dataclasses import replace

from lite_runner.config.options import GenerateOptions
from lite_runner.plan.backend import resolve_backend
from lite_runner.plan.inputs import read_inputs
from lite_runner.plan.job import share
from lite_runner.plan.operators import check_supported
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import with_resources
from lite_runner.plan.strategy import plan_of_strategy
from lite_runner.system import environment


def plan_generation(config: GenerateOptions) -> Plan:
    """Files, token ids, backend and memory, all validated. Raises RunnerError.

    With dry_run=true nothing is fetched; without a tokenizer a prompt counts its bytes as tokens.
    """
    began = time.perf_counter()
    if config.only_save_strategy:
        return plan_of_strategy(config)
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    inputs = read_inputs(config)
    files, job, ranks = inputs.files, inputs.job, inputs.ranks
    config = resolve_backend(inputs.config, files, job, device, ranks)
    first = share(config, job, ranks)  # the first replica has the most prompts
    if ranks.size > 1 and config.backend == "ms" and files.exported is None and not config.dry_run:
        check_supported(config, files, device, ranks)
        files.check_layout(ranks, vocab_parallel=config.vocab_parallel)
    plan = Plan(
        config=config,
        device=device,
        backend=config.backend,
        ranks=ranks,
        files=files,
        job=job,
        tokenizer=inputs.tokenizer,
    )
    return replace(with_resources(plan, first), seconds=time.perf_counter() - began)
