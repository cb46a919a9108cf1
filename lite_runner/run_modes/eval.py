"""run_mode=eval: the perplexity of a text."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from lite_runner import progress
from lite_runner.evaluation.opening import open_scorer
from lite_runner.evaluation.options import EvalOptions
from lite_runner.evaluation.options import eval_faults as faults
from lite_runner.evaluation.perplexity import evaluate
from lite_runner.evaluation.planning import plan_evaluation as plan
from lite_runner.model.finite import explained_nonfinite
from lite_runner.output.report import Result, RunFolder, Timing
from lite_runner.plan.plan import Plan

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions):
    """run_mode=eval"""


def run(plan: Plan, folder: RunFolder) -> None:
    """Print and write the perplexity. Raises RunnerError; KeyboardInterrupt after Ctrl-C, when
    what the windows before it gave has been written."""
    began = time.perf_counter()
    config, files, job = plan.config, plan.model, plan.work
    assert isinstance(config, Config)
    ids = np.array(job.tokens[0], np.int32)
    size, stride = config.window_of(files.model)
    scorer = open_scorer(plan, folder)
    load_s = plan.seconds + time.perf_counter() - began
    with closing(scorer), explained_nonfinite(files):
        evaluation = evaluate(scorer, ids, size, stride)
    evaluation = replace(evaluation, quant=str(files.quantization))
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=scorer.engine,
        load_checkpoint=files.source,
        results=[],
        evaluation=evaluation,
        timing=Timing(load_s=load_s, compile_s=scorer.compile_s),
    )
    folder.write_result(result)
    counted = "1 window" if evaluation.windows == 1 else f"{evaluation.windows} windows"
    progress.text(
        f"perplexity {evaluation.perplexity:.4f}: {evaluation.scored_tokens} of"
        f" {evaluation.tokens} tokens scored, {counted} of {size}\n"
    )
    progress.note(
        f"load {load_s:.1f} s, compile {scorer.compile_s:.1f} s, {evaluation.tok_s:.0f} tokens/s;"
        f" results in {folder.path}"
    )
    if evaluation.interrupted:
        raise KeyboardInterrupt
