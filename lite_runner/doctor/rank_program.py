"""What the doctor has two ranks do, started by msrun: meet, and gather a number from each."""

from __future__ import annotations

import os
import sys

from lite_runner.config.ranks import Ranks
from lite_runner.distributed.events import MET, Sender, connect
from lite_runner.distributed.join import schedule
from lite_runner.errors import RunnerError
from lite_runner.system import environment
from lite_runner.system.failure import failure_of


def main() -> int:
    """The part of one rank, or of the scheduler through which they meet."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        schedule()
        return 0
    ranks = Ranks(rank=int(os.environ["RANK_ID"]), data=int(os.environ["MS_WORKER_NUM"]))
    sender = connect(ranks.rank)
    assert sender is not None  # distributed/msrun_wrapper.py has connected already
    try:
        _gather(ranks, sender)
        sender.done()
    except Exception as error:
        failure = failure_of(error)
        sender.error(failure)
        os._exit(failure.exit_code)  # MindSpore's finalization would wait for the other rank
    return 0


def _gather(ranks: Ranks, sender: Sender) -> None:
    environment.import_mindspore()
    from lite_runner.backends import collectives
    from lite_runner.backends.device import set_device

    set_device("CPU", 0)
    collectives.meet(ranks)
    sender.stage(MET)
    found = collectives.gather(bytes([ranks.rank]))
    if found != [bytes([rank]) for rank in range(ranks.size)]:
        raise RunnerError(f"gathered {found}, expected the numbers of {ranks.size} ranks")


if __name__ == "__main__":
    sys.exit(main())
