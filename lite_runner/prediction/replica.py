"""Generating the completions of one replica's prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, nullcontext

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.config.options import GenerateOptions
from lite_runner.generation import Scheduler, generate
from lite_runner.model.finite import explained_nonfinite
from lite_runner.output.merge import RankResult, wait_for_all
from lite_runner.output.printer import Printer
from lite_runner.plan.job import Job, share
from lite_runner.plan.loading import load
from lite_runner.plan.plan import Plan
from lite_runner.prediction.adapter_report import adapter_report
from lite_runner.text.tokenizer import Tokenizer


def complete_share(
    plan: Plan, tokenizer: Tokenizer, began: float, interrupted: Callable[[], bool] | None
) -> RankResult:
    """The completions of this replica's share of the prompts, shown as they come.

    `began`: the time (time.perf_counter()) from which loading counts. `interrupted` is called
    before each step. Raises RunnerError.
    """
    config, ranks = plan.config, plan.ranks
    assert isinstance(config, GenerateOptions)
    job = share(config, plan.work, ranks)
    if not job.tokens:  # there are fewer prompts than replicas
        wait_for_all(ranks)
        return RankResult()
    backend = load(config, plan.model, plan.device, job, tokenizer, ranks, plan.memory)
    load_s = plan.seconds + time.perf_counter() - began
    backend.prepare()
    wait_for_all(ranks)
    with closing(backend), explained_nonfinite(plan.model, ranks):
        return _complete(config, backend, tokenizer, job, load_s, plan.work.texts, interrupted)


def _complete(
    config: GenerateOptions,
    backend: Backend,
    tokenizer: Tokenizer,
    job: Job,
    load_s: float,
    of_all: int,
    interrupted: Callable[[], bool] | None,
) -> RankResult:
    """The completions of a job by a prepared backend; `of_all`: texts of the whole run."""
    prepare_s = backend.compile_s
    total = job.texts
    counted = progress.step("generate", total, "texts") if total > 1 else nullcontext()
    with counted as step:
        printer = Printer(
            tokenizer,
            job,
            of_all=of_all,
            stream=config.stream,
            form=config.output_format,
            step=step,
        )
        scheduler = Scheduler(backend, prefix_cache=config.prefix_cache == "auto")
        outcome = generate(
            scheduler,
            job.scheduler_requests(),
            first_index=job.first_index,
            on_token=printer.on_token,
            on_finish=printer.on_finish,
            interrupted=interrupted,
        )
    rows = printer.rows(outcome.completions)
    return RankResult(
        rows=rows,
        engine=backend.info.engine,
        generation=outcome.timing,
        load_s=load_s,
        compile_s=backend.compile_s,
        prepare_s=prepare_s,
        adapters=adapter_report(job, rows, outcome, backend.adapters),
        interrupted=outcome.interrupted,
    )
