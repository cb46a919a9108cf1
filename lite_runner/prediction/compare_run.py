"""A run that compares two backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.config.predict_options import ComparedOptions
from lite_runner.errors import RunnerError
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.prediction.comparison import compare
from lite_runner.prediction.finish import write_results
from lite_runner.prediction.kept_logits import KeptLogits
from lite_runner.prediction.other_backend import other_backend
from lite_runner.prediction.replica import complete_share
from lite_runner.system.files import temporary_folder
from lite_runner.system.signals import CutShort

if TYPE_CHECKING:
    from lite_runner.text.tokenizer import Tokenizer


def run_and_compare(plan: Plan, tokenizer: Tokenizer, folder: RunFolder, began: float) -> None:
    """Complete the prompts with both backends, and write the results of the first with the
    comparison. Files of the other one are in compare/ of the run folder.

    `began`: as `complete_share` takes it. Raises RunnerError, also where they differ, and CutShort
    after Ctrl-C; results are written before.
    """
    config = plan.config
    assert isinstance(config, ComparedOptions)
    with temporary_folder("compare", folder.path) as work:
        kept = [KeptLogits(work / name, plan.decoder.vocab_size) for name in ("mine", "other")]
        mine = complete_share(plan, tokenizer, folder, began, None, kept[0])
        comparison = None
        try:
            if not mine.interrupted:
                other = other_backend(config, folder.path / "compare", kept[1])
                comparison = compare(
                    (config.backend, mine, kept[0]),
                    other,
                    tolerance=config.tolerance,
                    returns=plan.work.generation.num_return_sequences,
                )
        finally:
            write_results(plan, mine, tokenizer, folder, len(mine.rows), comparison)
    if comparison is None:
        raise CutShort
    for line in comparison.table():
        progress.note(line)
    if not comparison.same:
        raise RunnerError(
            f"compare_backend={config.compare_backend}: "
            f"{sum(one.differs for one in comparison.texts)} of {len(comparison.texts)} texts "
            f"differ from backend={config.backend} by more than "
            f"compare_tolerance={config.tolerance:g}",
            f"the table and {folder.path / 'result.json'} say where",
        )
