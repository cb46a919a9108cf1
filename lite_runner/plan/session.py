"""The plan of a model that is loaded for prompts that come later."""

from __future__ import annotations

import time
from dataclasses import replace

from lite_runner.config.options import SessionOptions
from lite_runner.errors import ConfigError
from lite_runner.model.adapters import all_adapters, check_adapter_job
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import end_tokens, tokenizer_for_plan
from lite_runner.plan.backend import resolve_backend
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import with_resources
from lite_runner.system import environment


def plan_session(
    config: SessionOptions, *, slots: int, length: int | None, key: str, all_logits: bool = False
) -> Plan:
    """Files, tokenizer, every adapter, backend and memory, all validated.

    `slots`: sequences at a time; `length`: tokens of each, as `key` says (None: the model's
    context); `all_logits`: prompts may have log-probabilities. With dry_run=true nothing is
    fetched. Raises RunnerError.
    """
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    files = locate_for_plan(config)
    context = files.model.seq_length
    length = length or context
    if length > context:
        raise ConfigError(f"{key}: got {length}, expected at most the model's context of {context}")
    tokenizer = tokenizer_for_plan(config, files)
    generation = replace(config.generation(files.model), max_length=None)
    if config.eos_token_id is None and tokenizer is not None:
        generation = replace(generation, eos_token_id=end_tokens(files.model, tokenizer))
    adapters = all_adapters(config, files.model)
    if adapters is not None:
        check_adapter_job(adapters, files)
    job = Job((), (), generation, slots, length, adapters=adapters, all_logits=all_logits)
    config = resolve_backend(config, files, job, device)
    plan = Plan(
        config=config,
        device=device,
        backend=config.backend,
        files=files,
        job=job,
        tokenizer=tokenizer,
    )
    return replace(with_resources(plan, job), seconds=time.perf_counter() - began)
