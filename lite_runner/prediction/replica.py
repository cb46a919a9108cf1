"""Generating the completions of one replica's prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, nullcontext

from lite_runner import progress
from lite_runner.config.options import GenerateOptions
from lite_runner.generation import Generator
from lite_runner.model.finite import explained_nonfinite
from lite_runner.output.merge import RankResult, wait_for_all
from lite_runner.output.printer import Printer
from lite_runner.output.report import RunFolder
from lite_runner.plan.job import Job, share
from lite_runner.plan.plan import Plan
from lite_runner.prediction.adapter_report import adapter_report
from lite_runner.prediction.kept_logits import KeptLogits
from lite_runner.prediction.opening import open_generator
from lite_runner.text.tokenizer import Tokenizer


def complete_share(
    plan: Plan,
    tokenizer: Tokenizer,
    folder: RunFolder,
    began: float,
    interrupted: Callable[[], bool] | None,
    logits: KeptLogits | None = None,
) -> RankResult:
    """The completions of this replica's share of the prompts, shown as they come.

    `began`: the time (time.perf_counter()) from which loading counts. `interrupted` is called
    before each step. `logits` takes those of each step. Raises RunnerError.
    """
    config, ranks = plan.config, plan.ranks
    assert isinstance(config, GenerateOptions)
    job = share(config, plan.work, ranks)
    if not job.tokens:  # there are fewer prompts than replicas
        wait_for_all(ranks)
        return RankResult()
    generator = open_generator(plan, job, tokenizer, folder)
    with closing(generator):
        load_s = plan.seconds + time.perf_counter() - began
        generator.prepare()
        wait_for_all(ranks)
        with explained_nonfinite(plan.model, ranks):
            texts = plan.work.texts
            return _complete(config, generator, tokenizer, job, load_s, texts, interrupted, logits)


def _complete(
    config: GenerateOptions,
    generator: Generator,
    tokenizer: Tokenizer,
    job: Job,
    load_s: float,
    of_all: int,
    interrupted: Callable[[], bool] | None,
    logits: KeptLogits | None,
) -> RankResult:
    """The completions of a job by a prepared generator; `of_all`: texts of the whole run."""
    prepare_s = generator.compile_s
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
        try:
            outcome = generator.generate(
                job.scheduler_requests(keep_logits=logits is not None),
                first_index=job.first_index,
                on_token=printer.on_token,
                on_finish=printer.on_finish,
                on_logits=None if logits is None else logits.add,
                interrupted=interrupted,
            )
        finally:
            printer.flush()
    rows = printer.rows(outcome.completions)
    return RankResult(
        rows=rows,
        engine=generator.engine,
        generation=outcome.timing,
        load_s=load_s,
        compile_s=generator.compile_s,
        prepare_s=prepare_s,
        adapters=adapter_report(job, rows, outcome, generator.adapters),
        interrupted=outcome.interrupted,
    )
