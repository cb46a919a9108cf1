"""The inputs of a run that generates: prompts, the model's files, token ids."""

from __future__ import annotations

from dataclasses import replace

from lite_runner import progress
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import GenerateOptions
from lite_runner.config.parallel import check_divides
from lite_runner.config.prompt import items_of
from lite_runner.config.ranks import Ranks
from lite_runner.config.requests import read_requests
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import tokenizer_for_plan
from lite_runner.plan.job import Job, estimate, prepare
from lite_runner.records import dataclass
from lite_runner.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Inputs:
    """All that is read before the backend is chosen."""

    config: GenerateOptions  # with several ranks it holds the prompts, for the other ranks
    ranks: Ranks
    files: ModelFiles
    tokenizer: Tokenizer | None  # None: dry_run=true, and it is not in the cache
    job: Job


def read_inputs(config: GenerateOptions) -> Inputs:
    """Read and validate them. Raises RunnerError.

    With dry_run=true nothing is fetched; without a tokenizer a prompt counts its bytes as tokens.
    """
    ranks = ranks_of(config)
    data = config.predict_data
    if config.dry_run:  # without prompts: the plan for a short one
        data = data or " "
    requests = read_requests(replace(config, predict_data=data))
    if ranks.size > 1:
        names = tuple(request.adapter for request in requests) if config.adapter_path else None
        adapters = config.adapter_id if names is None else names
        config = replace(config, adapter_id=adapters, predict_data=items_of(requests))
    elif config.adapter_path and not any(request.adapter for request in requests):
        progress.note(f"adapter_path={config.adapter_path}: adapter_id= names none, the base runs")
    files = locate_for_plan(config)
    check_divides(config, files.model)
    tokenizer = tokenizer_for_plan(config, files)
    if tokenizer is None:
        job = estimate(config, files, requests)
    else:
        job = prepare(config, files, tokenizer, requests)
    return Inputs(config, ranks, files, tokenizer, job)
