"""Stands in for a rank under msrun: writes its environment to a folder and is done.

record_environment.py FOLDER; of a run, its own folder
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    supervised = "LITE_RUNNER_EVENTS" in os.environ  # by this program's launcher
    if os.environ["MS_ROLE"] == "MS_SCHED":
        # MindSpore's ends after the ranks, too; the launcher takes an earlier end for a lost rank.
        while supervised and len([*folder.glob("done_*")]) < int(os.environ["MS_WORKER_NUM"]):
            time.sleep(0.02)
        return
    rank = int(os.environ["RANK_ID"])
    temporary = folder / f".rank_{rank}"
    temporary.write_text(json.dumps(dict(os.environ)))
    temporary.rename(folder / f"rank_{rank}.json")
    if supervised:
        from lite_runner.distributed.events import MET, connect

        sender = connect(rank)
        assert sender is not None
        sender.stage(MET)
        sender.done()
        (folder / f"done_{rank}").touch()


if __name__ == "__main__":
    main(Path(os.environ.get("LITE_RUNNER_FOLDER") or sys.argv[-1]))
