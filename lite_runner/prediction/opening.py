"""Opening what completes the prompts of a run."""

from __future__ import annotations

from lite_runner.config.options import GenerateOptions
from lite_runner.generation import Generator, ScheduledGenerator
from lite_runner.output.report import RunFolder
from lite_runner.plan.job import Job
from lite_runner.plan.loading import load
from lite_runner.plan.plan import Plan
from lite_runner.text.tokenizer import Tokenizer


def open_generator(plan: Plan, job: Job, tokenizer: Tokenizer, folder: RunFolder) -> Generator:
    """The generator of a plan with its weights, for this replica's `job`. Raises RunnerError."""
    config = plan.config
    assert isinstance(config, GenerateOptions)
    if plan.backend == "mindformers":
        from lite_runner.plan.open_mindformers import open_mindformers
        from lite_runner.prediction.mindformers import MindFormersGenerator

        return MindFormersGenerator(open_mindformers(plan, job, folder.path))
    backend = load(config, plan.model, plan.device, job, tokenizer, plan.ranks, plan.memory)
    return ScheduledGenerator(backend, prefix_cache=config.prefix_cache == "auto")
