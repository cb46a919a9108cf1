"""The results of a run that generates: result.json, hints and a summary."""

from __future__ import annotations

from lite_runner import progress
from lite_runner.config.options import GenerateOptions
from lite_runner.output.comparison import Comparison
from lite_runner.output.merge import RankResult
from lite_runner.output.printer import advice, show, summary
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.text.tokenizer import Tokenizer


def write_results(
    plan: Plan,
    whole: RankResult,
    tokenizer: Tokenizer,
    folder: RunFolder,
    shown: int,
    comparison: Comparison | None = None,
) -> None:
    """Print the rows after the first `shown`, and write the results of all replicas."""
    config, job = plan.config, plan.work
    assert isinstance(config, GenerateOptions)
    returns = job.generation.num_return_sequences
    for place, row in enumerate(whole.rows[shown:], shown):
        show(row, place, job.texts, config.output_format, returns)
    sampled = any(one.do_sample for one in job.options)
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=whole.engine,
        world_size=plan.ranks.size,
        load_checkpoint=plan.model.source,
        seed=job.generation.seed if sampled else None,
        results=whole.rows,
        adapters=whole.adapters,
        comparison=comparison,
        timing=whole.timing(),
        peak_rss_mib=whole.peak_rss_mib,
    )
    folder.write_result(result, texts_per_prompt=returns)
    for line in advice(whole.rows, job, chat=config.chat, tokenizer=tokenizer):
        progress.note(line)
    progress.note(summary(result, folder))
