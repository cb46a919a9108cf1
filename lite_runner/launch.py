"""Start a run: its folder, its log, and the process that does the work (this one, so far)."""

from __future__ import annotations

from lite_runner import environment, progress, worker
from lite_runner.config.schema import RunConfig
from lite_runner.report import RunFolder


def launch(config: RunConfig) -> int:
    """Do what `config` says and give the exit code. Raises RunnerError for the caller to show."""
    progress.configure(config.verbosity)
    if config.dry_run:
        worker.dry_run(config)
        return 0
    environment.check_packages()
    with RunFolder.create(config.output_dir, config.run_mode, config.model_name) as folder:
        folder.open_log()
        folder.write_config(config.without_secrets().to_dict())
        worker.run(config, folder)
    return 0
