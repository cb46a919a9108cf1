"""The strategy files of a run on several ranks: how they lie on the ranks, for tools that cut.

They are where MindFormers puts them: `<output_dir>/strategy/ckpt_strategy_rank_N.ckpt`, the name
and, where it has one, the folder as parallel.strategy_ckpt_save_file says.
"""

from __future__ import annotations

import re
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import ranks_of
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.system.files import make_folder
from lite_runner.weights.sharding.strategy import (
    Strategy,
    read_strategy,
    strategy_of,
    write_strategy,
)

_NAME = "ckpt_strategy.ckpt"


def write_strategy_files(config: RunConfig, model: Decoder) -> list[Path]:
    """Write a file for each rank, unless it is there, and give their paths.

    Raises ConfigError where something else stands under one of the names: nothing is overwritten.
    """
    ranks = ranks_of(config)
    strategy = strategy_of(model, ranks, vocab_parallel=config.vocab_parallel)
    files = [_file(config, rank) for rank in range(ranks.size)]
    missing = [file for file in files if not _is_there(file, strategy)]
    make_folder(files[0].parent)
    for file in missing:
        write_strategy(file, strategy)
    return files


def _file(config: RunConfig, rank: int) -> Path:
    asked = Path(config.parallel.strategy_ckpt_save_file or _NAME).expanduser()
    stem = re.sub(r"(_rank_\d+)?(\.ckpt)?$", "", asked.name)
    folder = asked.parent
    if folder == Path():
        folder = Path(config.output_dir).expanduser() / "strategy"
    return folder / f"{stem}_rank_{rank}.ckpt"


def _is_there(file: Path, strategy: Strategy) -> bool:
    """Whether the file says the same. Raises ConfigError where it is another one."""
    if not file.exists():
        return False
    try:
        if read_strategy(file) == strategy:
            return True
        what = "the strategy of another model or of other ranks"
    except ArtifactError:
        what = "no strategy file"
    raise ConfigError(
        f"{file}: exists, and is {what}",
        "move it away, or name another: parallel.strategy_ckpt_save_file=FOLDER/NAME.ckpt",
    )
