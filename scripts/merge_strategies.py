"""Join the strategy files of all pipeline stages into one, as mindspore.merge_pipeline_strategys.

    python scripts/merge_strategies.py output/strategy ckpt_strategy.ckpt

transform_checkpoint.py and run_mode=shard accept the result, and the folder too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner.app import guarded
from lite_runner.weights.sharding.strategy import merge_strategies


def main(argv: list[str] | None = None) -> int:
    """Run it; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with a file of each stage")
    parser.add_argument("out", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)

    def action() -> int:
        merge_strategies(arguments.folder, arguments.out)
        print(arguments.out.absolute())
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
