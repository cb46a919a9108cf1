"""One process's share of a run: the resolved config, and the run mode that it names."""

from __future__ import annotations

from collections.abc import Callable

from lite_runner import progress
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.output.report import RunFolder
from lite_runner.run_modes import convert, eval, export, predict, quantize, shard, strategies


def run(
    config: RunConfig,
    folder: RunFolder,
    ranks: Ranks | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> None:
    """Do the work of `config`, or the part of one of several `ranks`, with its results in `folder`.

    `interrupted` says to a rank that generates, before each step, whether all stop there.
    Raises RunnerError, and CutShort where Ctrl-C ended a generation whose results are written.
    """
    if config.predicts and config.only_save_strategy:
        strategies.run(config, folder)
    elif config.predicts:
        if config.parallel.strategy_ckpt_save_file and (ranks or Ranks()).rank == 0:
            strategies.write(config)
        predict.run(config, folder, ranks, interrupted)
    elif config.run_mode == "convert":
        convert.run(config, folder)
    elif config.run_mode == "eval":
        eval.run(config, folder)
    elif config.run_mode == "export":
        export.run(config, folder, ranks)
    elif config.run_mode == "quantize":
        quantize.run(config, folder)
    else:
        shard.run(config, folder)


def dry_run(config: RunConfig) -> None:
    """Print what `run` would read, write and take; nothing is fetched or written.

    Raises RunnerError, as `run` would before it computes.
    """
    modes = {
        "convert": convert.planned,
        "eval": eval.planned,
        "export": export.planned,
        "quantize": quantize.planned,
        "shard": shard.planned,
    }
    lines = modes.get(config.run_mode, predict.planned)(config)
    progress.text("\n".join(lines) + "\n")
