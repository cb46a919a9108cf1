"""What the doctor has two ranks do, started by msrun: meet, and gather a number from each."""

from __future__ import annotations

import os
import sys
import traceback

from lite_runner.config.ranks import Ranks
from lite_runner.distributed.events import MET, Sender, connect
from lite_runner.errors import EXIT_FAILED, RunnerError
from lite_runner.system import environment


def main() -> int:
    """The part of one rank, or of the scheduler through which they meet."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        from lite_runner.backends import collectives

        collectives.schedule()
        return 0
    ranks = Ranks(rank=int(os.environ["RANK_ID"]), data=int(os.environ["MS_WORKER_NUM"]))
    sender = connect(ranks.rank)
    assert sender is not None  # distributed/msrun_member.py has connected before
    try:
        _gather(ranks, sender)
        sender.done()
    except RunnerError as error:
        sender.error(error.exit_code, error.message, error.hint)
        os._exit(error.exit_code)  # MindSpore's own end would wait for the other rank
    except Exception as error:
        sender.error(EXIT_FAILED, f"{type(error).__name__}: {error}", "", traceback.format_exc())
        os._exit(EXIT_FAILED)
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
