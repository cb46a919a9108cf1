"""Files beside the results: strategy files, and GE options for MindSpore Lite."""

from __future__ import annotations

from dataclasses import replace

from lite_runner import progress
from lite_runner.config.ge import FILE_NAME, ge_config, render
from lite_runner.config.options import GenerateOptions
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.plan import Plan


def save_strategy(plan: Plan, folder: RunFolder, began: float) -> None:
    """only_save_strategy=true: the strategy files alone. Raises ConfigError where other files are
    in the way."""
    from lite_runner.model.strategy_files import write_strategy_files

    written = write_strategy_files(plan.config, plan.decoder)
    source, size = plan.config.checkpoint_source, len(written)
    folder.write_result(Result.of_files(plan.config, source, began, world_size=size))
    progress.note(f"wrote {written[0].parent}: the strategy of {size} ranks")


def write_side_files(plan: Plan, folder: RunFolder) -> Plan:
    """Write the strategy files and the GE options of a config; the plan reads these from
    config.ini in the run folder. Raises ConfigError as `save_strategy`."""
    config = plan.config
    assert isinstance(config, GenerateOptions)
    if config.parallel.strategy_ckpt_save_file and plan.ranks.rank == 0:
        from lite_runner.model.strategy_files import write_strategy_files

        write_strategy_files(config, plan.decoder)
    ge = ge_config(config)
    if ge is None or not ge.sections or config.infer.ge_preset is not None:
        return plan
    path = folder.write_text(FILE_NAME, render(ge.sections))
    infer = replace(config.infer, ge_config_path=str(path), ge_options=None)
    return replace(plan, config=replace(config, infer=infer))
