"""Merge the rank tables of several machines: MindFormers' merge_hccl.py.

    python scripts/merge_hccl.py hccl_8p_01234567_10.0.0.1.json hccl_8p_01234567_10.0.0.2.json

Ranks count through the files in the order given. The file hccl_2s_16p.json (2 machines, 16
ranks) appears in the current folder and its path is printed. Exit codes are those of run_lite.py:
2 tables that do not go together, 3 no writable folder, 4 a file that is no rank table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner.app import guarded
from lite_runner.distributed.rank_table import merge, read_rank_table
from lite_runner.errors import ConfigError


def write(names: Sequence[str]) -> Path:
    """Write the merged table and give its path. Raises RunnerError."""
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"the file {twice[0]} is given twice")
    merged = merge({name: read_rank_table(Path(name)) for name in names})
    path = Path.cwd() / f"hccl_{len(merged.servers)}s_{merged.ranks}p.json"
    merged.write(path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Merge; gives the exit code."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", nargs="+", metavar="FILE", help="a rank table")
    arguments = flags.parse_args(argv)

    def action() -> int:
        print(write(arguments.files))
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
