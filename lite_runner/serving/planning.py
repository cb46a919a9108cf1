"""The plan of a server: files, tokenizer, adapters, cache slots, backend and memory."""

from __future__ import annotations

import time
from dataclasses import replace

from lite_runner.errors import ConfigError
from lite_runner.model.adapters import all_adapters, check_adapter_job
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import end_tokens, tokenizer_for_plan
from lite_runner.plan.backend import resolve_backend
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import with_resources
from lite_runner.serving.options import ServeOptions
from lite_runner.system import environment


def plan_serving(config: ServeOptions) -> Plan:
    """All of it validated. With dry_run=true nothing is fetched. Raises RunnerError."""
    began = time.perf_counter()
    environment.check_packages("serve")
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    files = locate_for_plan(config)
    context = files.model.seq_length
    length = config.serve.max_length or context
    if length > context:
        raise ConfigError(
            f"serve.max_length: got {length}, expected at most the model's context of {context}"
        )
    tokenizer = tokenizer_for_plan(config, files)
    generation = config.generation(files.model)
    if config.eos_token_id is None and tokenizer is not None:
        generation = replace(generation, eos_token_id=end_tokens(files.model, tokenizer))
    adapters = all_adapters(config, files.model)
    if adapters is not None:
        check_adapter_job(adapters, files)
    job = Job(
        (),
        (),
        # OpenAI's default, whatever the model's; a request with temperature 0 is greedy.
        replace(generation, max_length=None, do_sample=config.do_sample is not False),
        slots=config.serve.max_running,
        length=length,
        adapters=adapters,
        all_logits=not config.runs_given_model or config.takes_packed,  # for prompt logprobs
    )
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
