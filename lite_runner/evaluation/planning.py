"""The plan of an evaluation: files, the text as token ids, memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError
from lite_runner.evaluation.options import EvalOptions, check_model, read_text
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.merged_adapter import with_adapter
from lite_runner.model.tokenizer import tokenizer_for_plan
from lite_runner.plan.backend import resolve_backend
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import with_resources
from lite_runner.sizing.need import readable
from lite_runner.system import environment


def plan_evaluation(config: EvalOptions) -> Plan:
    """Files, token ids and memory, all validated. With dry_run=true nothing is fetched, and without
    a tokenizer the text fills a window. Raises RunnerError."""
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    files = with_adapter(locate_for_plan(config), config)
    if config.model_config() is None:  # model=auto: its sizes are known only now
        check_model(config, files.model)
    text = read_text(config)
    size, stride = config.window_of(files.model)
    tokenizer = tokenizer_for_plan(config, files)
    ids: Sequence[int] = ()
    if tokenizer is not None:
        ids = tokenizer.encode(text)
        if len(ids) < 2:
            raise ConfigError(
                f"eval_data: tokens of {config.eval_data}: got {len(ids)}, expected at least 2",
                "a longer text: its first token is only context",
            )
    length = min(size, len(ids)) if ids else size
    job = Job((), (ids,), GenerationConfig(), slots=1, length=length, all_logits=True)
    if files.exported is not None and files.exported.manifest.layout != "packed":
        raise ConfigError(
            f"{files.exported.folder}: its graphs give the logits of the last token alone",
            "run_mode=eval takes an export of export.layout=packed, or backend=ms",
        )
    config = resolve_backend(config, files, job, device)
    plan = Plan(
        config=config,
        device=device,
        backend=config.backend,
        files=files,
        job=job,
        lines={
            "reads": f"{config.eval_data}: {readable(len(text.encode()))}, in windows of {size}"
            f" tokens, {stride} from one to the next"
        },
        tokenizer=tokenizer,
    )
    return replace(with_resources(plan, job), seconds=time.perf_counter() - began)
