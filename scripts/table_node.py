"""Print what run_distribute.sh and run_dist_gen.sh tell msrun_launcher.sh of this machine.

    python scripts/table_node.py RANK_TABLE_FILE '[8,16]' 16    # 16 8 10.0.0.1 1 0,1,2,3,4,5,6,7

These are WORKER_NUM LOCAL_WORKER MASTER_ADDR NODE_RANK VISIBLE_DEVICES, from the rank table and the
range of ranks of this machine. VISIBLE_DEVICES is for ASCEND_RT_VISIBLE_DEVICES, and left out where
there is no Ascend. Exit codes: 2 a range that is no machine of the table, 3 a device that is not
there, 4 a file that is no table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.app import guarded
from lite_runner.distributed.rank_table import Node, device_range, read_rank_table
from lite_runner.errors import ConfigError
from lite_runner.system.environment import physical_ids, visible_devices


def find(path: str, numbers: str, rank_size: str = "") -> Node:
    """The machine of a table that a range names; an empty rank size is one not given.

    Raises RunnerError.
    """
    if not re.fullmatch(r"\d{0,5}", rank_size, re.ASCII):
        raise ConfigError(f"RANK_SIZE: got {rank_size!r}, expected the number of all ranks")
    chosen = device_range(numbers)
    size = int(rank_size) if rank_size else None
    return read_rank_table(Path(path)).node(chosen.start, chosen.stop, size)


def main(argv: Sequence[str]) -> int:
    """Print one line; gives the exit code."""

    def action() -> int:
        node = find(*argv)
        devices = visible_devices(node.device_ids) if physical_ids() else ""
        print(node.worker_num, node.local_worker_num, node.master_addr, node.node_rank, devices)
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
