"""run_mode=predict: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import RunOptions
from lite_runner.config.checks import ComparedOptions, check_fits
from lite_runner.config.checks import PredictOptions as Config
from lite_runner.config.checks import predict_errors as errors
from lite_runner.config.generation import structured_options, without_effect
from lite_runner.config.parallel import check_divides
from lite_runner.config.prompt import Request, items_of
from lite_runner.config.prompts import prompt_file, read_requests
from lite_runner.config.schema import GenerateOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate_for_plan, tokenizer_for_plan
from lite_runner.output import Result, RunFolder
from lite_runner.output.completions import Display, complete
from lite_runner.plan import Job, Plan, encoded, estimate, fit, grammars_of, with_ends
from lite_runner.plan.resources import (
    check_before_fetching,
    fitted,
    fitted_text,
    lengths_of,
    options_of,
    resolve_backend,
    with_resources,
)
from lite_runner.sizing import model_lines
from lite_runner.system import environment
from lite_runner.system.files import make_folder

if TYPE_CHECKING:
    from lite_runner.model.adapters import AdapterJob
    from lite_runner.weights.sharding.partition import Strategy

__all__ = ["Config", "errors", "plan", "run"]

_STRATEGY = "ckpt_strategy.ckpt"  # MindFormers' name of it
LEAST_NEW = 128  # lower bound of a completion's length when memory is short


def plan(config: GenerateOptions, tokens: Sequence[list[int]] | None = None) -> Plan:
    """Files, token ids, backend and memory, all validated; `tokens`: the token ids of all prompts,
    for a rank whose first rank has made the same plan. Raises RunnerError.

    With dry_run=true nothing is fetched; without a tokenizer a prompt counts its bytes as tokens.
    """
    began = time.perf_counter()
    if config.only_save_strategy:
        return _plan_of_strategy(config)
    planned = _planned_inputs(config, tokens)
    assert isinstance(planned.config, GenerateOptions)
    config, files, job, ranks = planned.config, planned.model, planned.work, planned.ranks
    tell = config.parallel.node_rank == 0  # only one machine notes it
    options = options_of(planned)
    options = resolve_backend(files, options, tell=tell)
    config = replace(config, backend=options.settings.backend)
    if ranks.size == 1:
        config, job = _fitted(config, files, job, options)
    first = job.share(ranks)  # the first replica has the most prompts
    if ranks.size > 1 and not config.in_lite and not config.dry_run:
        files.check_layout(ranks, vocab_parallel=config.vocab_parallel)
    planned = with_resources(replace(planned, config=config, job=job), first)
    return replace(planned, seconds=time.perf_counter() - began)


def _fitted(
    config: GenerateOptions, files: ModelFiles, job: Job, options: RunOptions
) -> tuple[GenerateOptions, Job]:
    """The config and the job, with sizes that were not given reduced to fit the free memory: the
    batch, and the length if only the model's own limit bounds it."""
    each, shared = job.options, job.generation
    width = max(shared.num_beams, shared.num_return_sequences)
    slots = range(width, job.slots + 1, width)
    lengths = [job.length]
    given = config.max_new_tokens or config.max_length
    if not given and all(one.max_new_tokens == shared.max_new_tokens for one in each):
        prompt = max(map(len, job.tokens))
        lengths = lengths_of(job.length, min(job.length, prompt + LEAST_NEW))
    if config.predict_batch_size is not None:
        slots = slots[-1:]
    sized = fitted(files, options, slots, lengths)
    if (sized.slots, sized.length) == (job.slots, job.length):
        return config, job
    progress.note(f"note: memory: {fitted_text(sized, options)}")
    config = replace(config, predict_batch_size=sized.slots // width)
    batch = sized.slots // width
    return config, replace(job, slots=sized.slots, length=sized.length, batch=batch)


def _planned_inputs(config: GenerateOptions, tokens: Sequence[list[int]] | None) -> Plan:
    """The plan without backend and memory. With several ranks its config holds the prompts, for the
    other ranks."""
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    ranks = config.ranks
    data = config.predict_data
    if config.dry_run:  # without prompts: the plan for a short one
        data = data or " "
    lines = config.adapter_lines and prompt_file(data) is not None  # such lines name their adapters
    if config.adapter_path and not lines:
        from lite_runner.model.adapters import only_adapter  # not for runs without

        if (only := only_adapter(config.adapters)) is not None:
            config = replace(config, adapter_id=only)
    requests = read_requests(replace(config, predict_data=data))
    for idle in dict.fromkeys(without_effect(request.own) for request in requests):
        if idle:
            progress.note(f"prompts with options of their own: {idle}")
    structured = structured_options(vars(config))
    grammars_of(structured, requests, len(requests))  # checked before anything is fetched
    if ranks.size > 1:
        names = tuple(request.adapter for request in requests) if config.adapter_path else None
        adapters = config.adapter_id if names is None else names
        config = replace(config, adapter_id=adapters, predict_data=items_of(requests))
    elif config.adapter_path and not any(request.adapter for request in requests):
        progress.note(
            f"adapter_path={config.adapter_path}: adapter_id= names none, so the base model runs"
        )
    cluster = config.cluster if ranks.size > 1 else None
    if (fetched := check_before_fetching(config.settings, ranks, cluster)) is not None:
        _estimate(config, fetched, requests)  # adapters are read
    files = locate_for_plan(config.source)
    check_divides(config, files.model)
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    if tokenizer is None:
        job = _estimate(config, files, requests)
    else:
        opened = _adapters(config, files.model, requests)
        chat, system = config.chat, config.system
        ids = tokens or encoded(requests, files, tokenizer, chat=chat, system=system)
        if config.model_config() is None:  # model=auto: its sizes are known only now
            check_fits(config, files.model)
        generation = config.generation(files.model)
        job = fit(
            with_ends(generation, config.eos_token_id, files.model, tokenizer),
            *(files, tokenizer, ids, requests),
            truncate=config.truncate,
            batch=config.predict_batch_size,
            structured=structured,
        )
        if tokens is None and opened is not None:
            opened.check(files)
        job = replace(job, adapters=opened)
    return Plan(
        config=config, device=device, ranks=ranks, files=files, job=job, tokenizer=tokenizer
    )


def _estimate(config: GenerateOptions, files: ModelFiles, requests: Sequence[Request]) -> Job:
    """The job for prompts that are not tokenized."""
    job = estimate(
        config.generation(files.model),
        files.model,
        requests,
        system=config.system,
        batch=config.predict_batch_size,
    )
    return replace(job, adapters=_adapters(config, files.model, requests))


def _adapters(
    config: GenerateOptions, model: Decoder, requests: Sequence[Request]
) -> AdapterJob | None:
    if not config.adapter_path:
        return None
    from lite_runner.model.adapters import open_adapter_job  # not for runs without

    names = [request.adapter for request in requests]
    return open_adapter_job(config.adapters, model, config.ranks, names)


def _plan_of_strategy(config: GenerateOptions) -> Plan:
    """The ranks and the model's sizes. Raises RunnerError."""
    files = None if config.model_config() else locate_for_plan(config.source)
    plan = Plan(config=config, ranks=config.ranks, files=files)
    check_fits(config, plan.decoder)
    source = files.location() if files else config.checkpoint_source
    writes = {"writes": f"the strategy of {plan.ranks.size} ranks"}
    return replace(
        plan, lines=model_lines(config.run_mode, config.model_name, plan.decoder, source) | writes
    )


def run(plan: Plan, folder: RunFolder, interrupted: Callable[[], bool] | None = None) -> None:
    """Generate, print and write the results. Raises RunnerError; CutShort after Ctrl-C, when
    partial results have been written.

    Each rank calls this once all have joined; rank 0 alone writes the results. All stop where
    `interrupted`, called before every step, returns true.
    """
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, GenerateOptions)
    if config.only_save_strategy:
        _save_strategy(plan, folder, began)
        return
    if config.parallel.strategy_ckpt_save_file and plan.ranks.rank == 0:
        write_strategy_files(plan)
    display = Display(config.stream, config.output_format, config.chat)
    if isinstance(config, ComparedOptions) and config.compare_backend is not None:
        from lite_runner.output.comparison import compared

        with compared(plan, folder):
            complete(plan, folder, display, began, interrupted)
    else:
        complete(plan, folder, display, began, interrupted)


def _save_strategy(plan: Plan, folder: RunFolder, began: float) -> None:
    """only_save_strategy=true: the strategy files alone. Raises ConfigError where other files are
    in the way."""
    written = write_strategy_files(plan)
    source, size = plan.config.checkpoint_source, len(written)
    folder.write_result(Result.of_files(plan, source, began, world_size=size))
    progress.note(f"wrote {written[0].parent}: the strategy of {size} ranks")


def write_strategy_files(plan: Plan) -> list[Path]:
    """Write the layout of the tensors on each rank, for tools that reshard checkpoints, to
    `<output_dir>/strategy/ckpt_strategy_rank_N.ckpt` or strategy_ckpt_save_file; their paths.

    As in MindFormers, strategies that another run left by these names are replaced, those of more
    ranks removed. Raises ConfigError for any other file, and for the strategies of the checkpoint
    that this run reads.
    """
    from lite_runner.weights.sharding.partition import strategy_of
    from lite_runner.weights.sharding.strategy import write_strategy

    config, ranks = plan.config, plan.ranks
    strategy = strategy_of(plan.decoder, ranks, vocab_parallel=config.vocab_parallel)
    asked = Path(config.parallel.strategy_ckpt_save_file or _STRATEGY).expanduser()
    folder, stem = asked.parent, re.sub(r"(_rank_\d+)?(\.ckpt)?$", "", asked.name)
    if folder == Path():
        folder = Path(config.output_dir).expanduser() / "strategy"
    sources = (config.source.strategy, config.load_checkpoint)
    read = [Path(one).expanduser().resolve() for one in sources if one]
    name = re.compile(rf"{re.escape(stem)}_rank_\d+\.ckpt")
    there = sorted(file for file in folder.glob("*") if name.fullmatch(file.name))
    earlier = [file for file in there if _is_earlier(file, strategy, read)]
    make_folder(folder)
    for file in earlier:
        file.unlink()
    files = [folder / f"{stem}_rank_{rank}.ckpt" for rank in range(ranks.size)]
    for file in files:
        if not file.exists():
            write_strategy(file, strategy)
    if earlier:
        progress.note(f"{folder}: replaced the strategies of an earlier run")
    return files


def _is_earlier(file: Path, strategy: Strategy, read: Sequence[Path]) -> bool:
    """True for a file with another strategy, to be replaced. Raises ConfigError where it may not
    be; `read`: where the checkpoint lies."""
    from lite_runner.weights.sharding.strategy import read_strategy

    try:
        if read_strategy(file) == strategy:
            return False
    except ArtifactError:
        what = "no strategy file"
    else:
        if not any(file.resolve().is_relative_to(path) for path in read):
            return True
        what = "a strategy of the checkpoint that is read"
    raise ConfigError(
        f"{file}: exists, and is {what}",
        "move it away, or name another: parallel.strategy_ckpt_save_file=FOLDER/NAME.ckpt",
    )
