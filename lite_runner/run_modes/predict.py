"""run_mode=predict and slora: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

from lite_runner import progress
from lite_runner.backends.base import AdapterSlots, Backend
from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.cluster import ranks_of
from lite_runner.config.fields import Fault, fault
from lite_runner.config.fields import show as show_value
from lite_runner.config.ge import FILE_NAME, ge_config, ge_faults, render
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.parallel import generate_faults
from lite_runner.config.prompt import BASE
from lite_runner.config.prompts import prompt_faults
from lite_runner.config.ranks import Ranks
from lite_runner.config.requests import read_requests, request_faults
from lite_runner.config.sampling_checks import sampling_faults
from lite_runner.generation import Generation, Scheduler, generate
from lite_runner.model import model_files
from lite_runner.model.adapters import open_wanted
from lite_runner.model.model_files import ModelFiles
from lite_runner.model.strategy_files import write_strategy_files
from lite_runner.output.merge import Share, gather, seed_of_all, wait_for_all
from lite_runner.output.printer import Printer, advice, show, summary
from lite_runner.output.report import AdapterReport, AdapterUse, Result, RowResult, RunFolder
from lite_runner.plan import footprint
from lite_runner.plan.session import (
    Job,
    load,
    longest_of,
    memory_levers,
    memory_need,
    options_of,
    prepare,
    share,
    slots_for,
    with_backend,
)
from lite_runner.sizing.need import plan
from lite_runner.sizing.scaling import ranks_plan
from lite_runner.system import environment
from lite_runner.system.signals import CutShort
from lite_runner.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Config(GenerateOptions):
    """run_mode=predict"""


def faults(config: GenerateOptions) -> Iterator[Fault]:
    """What does not go together in a run that generates."""
    yield from prompt_faults(config)
    yield from request_faults(config)
    yield from sampling_faults(config, config.generation(), vars(config))
    yield from adapter_faults(config, one=False)
    if config.only_save_strategy and not config.use_parallel:
        yield fault(
            ("only_save_strategy", "use_parallel"),
            "only_save_strategy=true needs use_parallel=true",
        )
    for key in ("src_strategy_path_or_dir", "auto_trans_ckpt"):
        if config.runs_given_model and (value := getattr(config, key)):
            yield fault(
                key,
                f"{key}={value if isinstance(value, str) else show_value(value)} has no meaning"
                " with an exported model, which has its weights in it",
            )
    if not config.runs_given_model:
        yield from strategy_faults(config)
    yield from offline_faults(config)
    yield from ge_faults(config)
    yield from generate_faults(config)


def run(
    config: GenerateOptions,
    folder: RunFolder,
    ranks: Ranks | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> None:
    """Generate, print and write the results. Raises RunnerError; CutShort after Ctrl-C, when what
    there is has been written.

    Of several `ranks`, which have met and each call this, rank 0 alone writes the results. Ctrl-C
    stops them where `interrupted` says so, which is asked before every step.
    """
    ranks = ranks or Ranks()
    began = time.perf_counter()
    if config.only_save_strategy:
        written = write_strategy_files(config)
        source, size = config.checkpoint_source, len(written)
        folder.write_result(Result.of_files(config, source, began, world_size=size))
        progress.note(f"wrote {written[0].parent}: the strategy of {size} ranks")
        return
    if config.parallel.strategy_ckpt_save_file and ranks.rank == 0:
        write_strategy_files(config)
    device = environment.resolve_device(config.context.device_target)
    config = seed_of_all(config, ranks)
    requests = read_requests(config)
    if config.adapter_path and not any(request.adapter for request in requests):
        progress.note(f"adapter_path={config.adapter_path}: adapter_id= names none, the base runs")
    files = model_files.locate(config)
    tokenizer = model_files.tokenizer_of(config, files)
    job = prepare(config, files, tokenizer, requests)
    config = with_backend(with_ge_file(config, folder), files, job)
    whole_job, job = job, share(config, job, ranks)
    of_all = len(requests) * job.generation.num_return_sequences
    mine, engine = Share(), ""
    if job.tokens:
        backend = load(config, files, device, job, tokenizer, ranks)
        load_s = time.perf_counter() - began
        backend.prepare()
        wait_for_all(ranks)
        with closing(backend):
            mine = _complete(config, backend, tokenizer, job, load_s, of_all, interrupted)
        engine = backend.info.engine
    else:  # there are fewer prompts than copies of the model
        wait_for_all(ranks)
    whole = gather(mine, ranks)
    if ranks.rank > 0:
        if whole.interrupted:
            raise CutShort
        return
    returns = job.generation.num_return_sequences
    for place, row in enumerate(whole.rows[len(mine.rows) :], len(mine.rows)):
        show(row, place, of_all, config.output_format, returns)
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=engine,
        world_size=ranks.size,
        load_checkpoint=files.source,
        seed=whole_job.generation.seed if any(one.do_sample for one in whole_job.each) else None,
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


def _complete(
    config: GenerateOptions,
    backend: Backend,
    tokenizer: Tokenizer,
    job: Job,
    load_s: float,
    of_all: int,
    interrupted: Callable[[], bool] | None,
) -> Share:
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
    return Share(
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


def planned(config: GenerateOptions) -> list[str]:
    """The lines of dry_run=true. Nothing is fetched, so prompts are counted by their bytes: no
    token of theirs is shorter. Of adapters the headers are read."""
    device = environment.resolve_device(config.context.device_target, planned=True)
    ranks = ranks_of(config)
    files, job = planned_job(config)
    mine = share(config, job, ranks)
    need = memory_need(config, files, mine, device, ranks)
    lines = plan(
        config,
        files.model,
        need,
        device=device,
        slots=mine.slots,
        length=mine.length,
        held=footprint.held_as(config, files, device, ranks),
        levers=lambda: memory_levers(config, files, mine, device, ranks),
        checkpoint=files.whereabouts(),
    )
    if config.use_parallel:
        lines += ranks_plan(
            config, files.model, need, device=device, slots=mine.slots, length=mine.length
        )
    return lines


def planned_job(config: GenerateOptions) -> tuple[ModelFiles, Job]:
    """What would be run, as far as it is known without the tokenizer."""
    # Without prompts it is the plan for a short one.
    requests = read_requests(replace(config, predict_data=config.predict_data or " "))
    files = model_files.planned(config)
    model = files.model
    generation = config.generation(model)
    sizes = [request.size(config.system) for request in requests]
    each = options_of(generation, requests, len(requests))
    length = min(model.seq_length, longest_of(sizes, each, model.seq_length))
    slots = slots_for(config, generation, len(requests))
    adapters = open_wanted(config, model, [request.adapter for request in requests])
    job = Job(requests, [()] * len(requests), generation, slots, length, adapters=adapters)
    return files, job
