"""Stands in for a rank under msrun: writes its environment to a folder and is done.

record_environment.py [CONFIG] FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    if os.environ["MS_ROLE"] == "MS_SCHED":
        return
    rank = int(os.environ["RANK_ID"])
    temporary = folder / f".rank_{rank}"
    temporary.write_text(json.dumps(dict(os.environ)))
    temporary.rename(folder / f"rank_{rank}.json")
    if "LITE_RUNNER_EVENTS" in os.environ:  # of this program's launcher
        from lite_runner.distributed.events import MET, connect

        sender = connect(rank)
        assert sender is not None
        sender.stage(MET)
        sender.done()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
