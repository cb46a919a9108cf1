"""Opening what scores a text."""

from __future__ import annotations

from lite_runner.evaluation.mindformers import MindFormersScorer
from lite_runner.evaluation.options import EvalOptions
from lite_runner.evaluation.perplexity import BackendScorer, Scorer
from lite_runner.output.report import RunFolder
from lite_runner.plan.loading import load
from lite_runner.plan.open_mindformers import open_mindformers
from lite_runner.plan.plan import Plan


def open_scorer(plan: Plan, folder: RunFolder) -> Scorer:
    """The model of a plan with its weights; MindFormers' yaml stays in `folder`. Raises
    RunnerError."""
    config = plan.config
    assert isinstance(config, EvalOptions)
    if plan.backend == "mindformers":
        return MindFormersScorer(open_mindformers(plan, plan.work, folder.path))
    job, need = plan.work, plan.memory
    backend = load(config, plan.model, plan.device, job, plan.tokenizer, need=need)
    return BackendScorer(backend)
