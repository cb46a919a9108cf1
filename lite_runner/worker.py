"""One process's share of a run: the resolved config, and the run mode that it names."""

from __future__ import annotations

from collections.abc import Callable

from lite_runner import progress
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.output.report import RunFolder
from lite_runner.run_modes import run_mode


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
    mode = run_mode(config.run_mode)
    if config.on_ranks:
        mode.run(config, folder, ranks, interrupted)
    else:
        mode.run(config, folder)


def dry_run(config: RunConfig) -> None:
    """Print what `run` would read, write and take; nothing is fetched or written.

    Raises RunnerError, as `run` would before it computes.
    """
    progress.text("\n".join(run_mode(config.run_mode).planned(config)) + "\n")
