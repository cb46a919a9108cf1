"""A launcher in a process of its own, as run_lite.py is one, with the stand-in for its ranks.

drive.py FOLDER FAULT MESSAGE [NODES NODE_RANK PORT]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run as a program

from lite_runner.app import guarded
from lite_runner.config.sections import Cluster
from lite_runner.distributed.job import Limits, run_ranks


def main(folder: str, fault: str, message: str, *node: str) -> int:
    cluster = Cluster(2, 2)
    if node:
        nodes, node_rank, port = map(int, node)
        cluster = Cluster(nodes, 1, master_port=port, node_rank=node_rank)
    program = [str(Path(__file__).with_name("stand_in.py")), fault, message]
    run_ranks(program, cluster, Path(folder), Limits(rendezvous=60, exit=20))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(*sys.argv[1:])))
