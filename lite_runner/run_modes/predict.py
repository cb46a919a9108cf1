"""run_mode=predict: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import AdapterSlots, Backend
from lite_runner.config.ge import FILE_NAME, ge_config, render
from lite_runner.config.generate_checks import generate_faults as faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompt import BASE
from lite_runner.generation import Generation, Scheduler, generate
from lite_runner.model import model_files
from lite_runner.model.strategy_files import write_strategy_files
from lite_runner.output.merge import RankResult, gather, seed_of_all, wait_for_all
from lite_runner.output.printer import Printer, advice, show, summary
from lite_runner.output.report import AdapterReport, AdapterUse, Result, RowResult, RunFolder
from lite_runner.plan.generating import plan_generation as plan
from lite_runner.plan.job import Job, share, with_seed_of
from lite_runner.plan.loading import load
from lite_runner.plan.plan import Plan
from lite_runner.system.signals import CutShort
from lite_runner.text.tokenizer import Tokenizer

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(GenerateOptions):
    """run_mode=predict"""


def run(plan: Plan, folder: RunFolder, interrupted: Callable[[], bool] | None = None) -> None:
    """Generate, print and write the results. Raises RunnerError; CutShort after Ctrl-C, when what
    there is has been written.

    Of several ranks, which have met and each call this, rank 0 alone writes the results. Ctrl-C
    stops them where `interrupted` says so, which is asked before every step.
    """
    began = time.perf_counter()
    ranks, config = plan.ranks, plan.config
    assert isinstance(config, GenerateOptions)
    if config.only_save_strategy:
        _save_strategy(config, plan.decoder, folder, began)
        return
    if config.parallel.strategy_ckpt_save_file and ranks.rank == 0:
        write_strategy_files(config, plan.decoder)
    config = seed_of_all(config, ranks)
    files = plan.model
    tokenizer = plan.tokenizer or model_files.tokenizer_of(config, files)
    whole_job = with_seed_of(plan.work, config)
    config, job = with_ge_file(config, folder), share(config, whole_job, ranks)
    of_all = len(whole_job.tokens) * job.generation.num_return_sequences
    mine, engine = RankResult(), ""
    if job.tokens:
        backend = load(config, files, plan.device, job, tokenizer, ranks, plan.memory)
        load_s = plan.seconds + time.perf_counter() - began
        backend.prepare()
        wait_for_all(ranks)
        with closing(backend):
            mine = _complete(config, backend, tokenizer, job, load_s, of_all, interrupted)
        engine = backend.info.engine
    else:  # there are fewer prompts than replicas
        wait_for_all(ranks)
    whole = gather(mine, ranks)
    if ranks.rank > 0:
        if whole.interrupted:
            raise CutShort
        return
    returns = job.generation.num_return_sequences
    for place, row in enumerate(whole.rows[len(mine.rows) :], len(mine.rows)):
        show(row, place, of_all, config.output_format, returns)
    sampled = any(one.do_sample for one in whole_job.each)
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=engine,
        world_size=ranks.size,
        load_checkpoint=files.source,
        seed=whole_job.generation.seed if sampled else None,
        results=whole.rows,
        adapters=whole.adapters,
        timing=whole.timing(),
        peak_rss_mib=whole.peak_rss_mib,
    )
    folder.write_result(result, texts_per_prompt=job.generation.num_return_sequences)
    for line in advice(whole.rows, whole_job, chat=config.chat, tokenizer=tokenizer):
        progress.note(line)
    progress.note(summary(result, folder))
    if whole.interrupted:
        raise CutShort


def _save_strategy(
    config: GenerateOptions, model: Decoder, folder: RunFolder, began: float
) -> None:
    written = write_strategy_files(config, model)
    source, size = config.checkpoint_source, len(written)
    folder.write_result(Result.of_files(config, source, began, world_size=size))
    progress.note(f"wrote {written[0].parent}: the strategy of {size} ranks")


def _complete(
    config: GenerateOptions,
    backend: Backend,
    tokenizer: Tokenizer,
    job: Job,
    load_s: float,
    of_all: int,
    interrupted: Callable[[], bool] | None,
) -> RankResult:
    """The completions of a job, shown as they come.

    The backend is prepared; `of_all` texts are what the whole run makes.
    """
    prepare_s = backend.compile_s
    total = len(job.tokens) * job.generation.num_return_sequences
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
            job.asked(),
            first_index=job.first,
            on_token=printer.on_token,
            on_finish=printer.on_finish,
            interrupted=interrupted,
        )
    rows = printer.rows(outcome.completions)
    return RankResult(
        rows=rows,
        generation=outcome.timing,
        load_s=load_s,
        compile_s=backend.compile_s,
        prepare_s=prepare_s,
        adapters=adapter_report(job, rows, outcome, backend.adapters),
        interrupted=outcome.interrupted,
    )


def adapter_report(
    job: Job, rows: Sequence[RowResult], outcome: Generation, slots: AdapterSlots | None
) -> AdapterReport | None:
    """What was done with each adapter; None for a run without."""
    if job.adapters is None:
        return None
    used = {}
    wanted = [job.adapters.name(place) for place in range(len(job.tokens))]
    for adapter in (None, *job.adapters.adapters):
        name = None if adapter is None else adapter.name
        mine = [row for row in rows if row.adapter == name]
        used[name or BASE] = AdapterUse(
            modules=0 if adapter is None else len(adapter.pairs),
            prompts=wanted.count(name),
            prompt_tokens=sum(row.prompt_tokens for row in mine),
            generated_tokens=sum(row.generated_tokens for row in mine),
            seconds=outcome.adapter_s.get(name, 0.0),
        )
    if slots is None:
        return AdapterReport(0, 0, 0, used)
    return AdapterReport(slots.slots, slots.nbytes, slots.loads, used)


def with_ge_file(config: GenerateOptions, folder: RunFolder) -> GenerateOptions:
    """GE options that are all in the config, written as config.ini into the run folder and read
    from there."""
    ge = ge_config(config)
    if ge is None or not ge.sections or config.infer.ge_preset is not None:
        return config
    path = folder.write_text(FILE_NAME, render(ge.sections))
    return replace(config, infer=replace(config.infer, ge_config_path=str(path), ge_options=None))
