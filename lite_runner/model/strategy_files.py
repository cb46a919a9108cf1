"""Strategy files: the layout of the tensors on the ranks, for tools that reshard checkpoints.

They lie where MindFormers writes them, `<output_dir>/strategy/ckpt_strategy_rank_N.ckpt`, or at
the path that parallel.strategy_ckpt_save_file gives.
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
    """Write a file for each rank, unless it exists, and return their paths.

    Raises ConfigError where one exists with other content: nothing is overwritten.
    """
    ranks = ranks_of(config)
    strategy = strategy_of(model, ranks, vocab_parallel=config.vocab_parallel)
    files = [_file(config, rank) for rank in range(ranks.size)]
    missing = [file for file in files if not _exists(file, strategy)]
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


def _exists(file: Path, strategy: Strategy) -> bool:
    """Whether the file holds this strategy. Raises ConfigError where it holds anything else."""
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
