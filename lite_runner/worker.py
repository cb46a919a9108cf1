"""One process's share of a run: the resolved config, and the run mode that it names."""

from __future__ import annotations

from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.report import RunFolder
from lite_runner.run_modes import convert, evaluate, export, predict, quantize, shard


def run(config: RunConfig, folder: RunFolder, ranks: Ranks | None = None) -> None:
    """Do the work of `config`, or the part of one of several `ranks`, with its results in `folder`.

    Raises RunnerError.
    """
    if config.predicts:
        predict.run(config, folder, ranks)
    elif config.run_mode == "convert":
        convert.run(config, folder)
    elif config.run_mode == "eval":
        evaluate.run(config, folder)
    elif config.run_mode == "export":
        export.run(config, folder)
    elif config.run_mode == "quantize":
        quantize.run(config, folder)
    else:
        shard.run(config, folder)


def dry_run(config: RunConfig) -> None:
    """Print what `run` would do and take."""
    if not config.predicts:
        raise ConfigError(f"dry_run=true is not available yet with run_mode={config.run_mode}")
    predict.dry_run(config)
