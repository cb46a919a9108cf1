"""Files beside the results: strategy files, and GE options for MindSpore Lite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.lite.ge import FILE_NAME, ge_config, render
from lite_runner.config.parallel import ranks_of
from lite_runner.config.schema import GenerateOptions, RunConfig, StrategyOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.system.files import make_folder

if TYPE_CHECKING:
    from lite_runner.weights.sharding.partition import Strategy

_NAME = "ckpt_strategy.ckpt"  # of MindFormers


def save_strategy(plan: Plan, folder: RunFolder, began: float) -> None:
    """only_save_strategy=true: the strategy files alone. Raises ConfigError where other files are
    in the way."""
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
        write_strategy_files(config, plan.decoder)
    ge = ge_config(config)
    if ge is None or not ge.sections or config.infer.ge_preset is not None:
        return plan
    path = folder.write_text(FILE_NAME, render(ge.sections))
    infer = replace(config.infer, ge_config_path=str(path), ge_options=None)
    return replace(plan, config=replace(config, infer=infer))


def write_strategy_files(config: RunConfig, model: Decoder) -> list[Path]:
    """Write the layout of the tensors on each rank, for tools that reshard checkpoints, to
    `<output_dir>/strategy/ckpt_strategy_rank_N.ckpt` or strategy_ckpt_save_file; their paths.

    As in MindFormers, strategies that another run left by these names are replaced, those of more
    ranks removed. Raises ConfigError for any other file, and for the strategies of the checkpoint
    that this run reads.
    """
    from lite_runner.weights.sharding.partition import strategy_of
    from lite_runner.weights.sharding.strategy import write_strategy

    ranks = ranks_of(config)
    strategy = strategy_of(model, ranks, vocab_parallel=config.vocab_parallel)
    asked = Path(config.parallel.strategy_ckpt_save_file or _NAME).expanduser()
    folder, stem = asked.parent, re.sub(r"(_rank_\d+)?(\.ckpt)?$", "", asked.name)
    if folder == Path():
        folder = Path(config.output_dir).expanduser() / "strategy"
    source = config.src_strategy_path_or_dir if isinstance(config, StrategyOptions) else ""
    read = [Path(one).expanduser().resolve() for one in (source, config.load_checkpoint) if one]
    name = re.compile(rf"{re.escape(stem)}_rank_\d+\.ckpt")
    there = sorted(file for file in folder.glob("*") if name.fullmatch(file.name))
    earlier = [file for file in there if _is_earlier(file, strategy, read)]
    make_folder(folder)
    for file in earlier:
        file.unlink()
    files = [folder / f"{stem}_rank_{rank}.ckpt" for rank in range(ranks.size)]
    for file in files:
        if not file.exists():
            write_strategy(file, strategy)
    if earlier:
        progress.note(f"{folder}: replaced the strategies of an earlier run")
    return files


def _is_earlier(file: Path, strategy: Strategy, read: Sequence[Path]) -> bool:
    """True for a file with another strategy, to be replaced. Raises ConfigError where it may not
    be; `read`: where the checkpoint lies."""
    from lite_runner.weights.sharding.strategy import read_strategy

    try:
        if read_strategy(file) == strategy:
            return False
    except ArtifactError:
        what = "no strategy file"
    else:
        if not any(file.resolve().is_relative_to(path) for path in read):
            return True
        what = "a strategy of the checkpoint that is read"
    raise ConfigError(
        f"{file}: exists, and is {what}",
        "move it away, or name another: parallel.strategy_ckpt_save_file=FOLDER/NAME.ckpt",
    )
