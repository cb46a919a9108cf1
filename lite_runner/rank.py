"""One rank of a job, started by msrun: its share of a run whose plan is made already.

    python -m lite_runner.rank RUN_FOLDER/plan.json RUN_FOLDER

Which rank it is stands in the environment, as msrun sets it. msrun starts the same command once
more as the scheduler, through which the ranks meet.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.backends import ascend_context
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.cluster import placed
from lite_runner.config.ranks import Ranks
from lite_runner.distributed.events import MET, SOCKET_VARIABLE, Sender, connect
from lite_runner.distributed.membership import device_of, membership
from lite_runner.distributed.outlet import Outlet
from lite_runner.distributed.stopping import BOARD, Board, CommonStop
from lite_runner.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    ConfigError,
    EnvironmentFault,
    RunnerError,
)
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.plugins import register_plugins
from lite_runner.run_modes import from_dict, run_mode
from lite_runner.system import environment, memory
from lite_runner.system.signals import CutShort, Terminated, handled, offered

logger = logging.getLogger("lite_runner.rank")


def main(argv: Sequence[str] | None = None) -> int:
    """Do the work of this rank; the exit code is that of a single process."""
    args = sys.argv[1:] if argv is None else list(argv)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        from lite_runner.backends import collectives

        collectives.schedule()
        return 0
    rank = int(os.environ.get("RANK_ID", "0"))
    sender = connect(rank)
    progress.redirect(Outlet(rank, sender))
    try:
        with handled():
            register_plugins(args[2:])
            with suppress(CutShort):  # as complete as it can be; the launcher has asked for it
                _run(Path(args[0]), Path(args[1]), rank)
        if sender is not None:
            sender.done()
        return 0
    except RunnerError as error:
        return _tell(sender, error.exit_code, error.message, error.hint)
    except KeyboardInterrupt:
        return _tell(sender, EXIT_INTERRUPTED, "interrupted")
    except Terminated:
        return _tell(sender, EXIT_TERMINATED, "terminated")
    except Exception as error:
        lacking = memory.fault_of(error)
        if lacking is not None:
            return _tell(sender, lacking.exit_code, lacking.message, lacking.hint)
        message = f"{type(error).__name__}: {error}"
        return _tell(sender, EXIT_FAILED, message, trace=traceback.format_exc())


def _run(plan_file: Path, run_folder: Path, rank: int) -> None:
    with RunFolder(run_folder) as folder:
        folder.open_log(f"rank_{rank}.log")
        raw = _read(plan_file)
        config = from_dict(raw["config"])
        progress.configure(config.verbosity)
        device = environment.resolve_device(config.context.device_target)
        config = placed(config, device, _device_id() if device == "Ascend" else 0)
        plan = Plan.from_dict(raw, config).of_rank(rank)
        ascend_context.choose(AscendSettings.of(config.context), device, tell=False)
        _meet(device, config.context.device_id, plan.ranks)
        board = _board()
        with nullcontext() if board is None else offered(board.take):
            run_mode(config.run_mode).run(plan, folder, CommonStop(board, plan.ranks).here)


def _board() -> Board | None:
    """The board on which the launcher asks all ranks to stop; None where there is none."""
    events = os.environ.get(SOCKET_VARIABLE)
    path = None if events is None else Path(events).with_name(BOARD)
    return None if path is None or not path.exists() else Board(path)


def _meet(device: str, device_id: int, ranks: Ranks) -> None:
    with progress.step(f"meet the {ranks.size} ranks"):
        environment.import_mindspore()
        from lite_runner.backends import collectives
        from lite_runner.backends.device import set_device

        set_device(device, device_id)
        collectives.meet(ranks)
    progress.status(MET)


def _read(plan_file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(plan_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{plan_file}: cannot be read: {error}") from error
    if not isinstance(raw, dict) or "config" not in raw:
        raise ConfigError(f"{plan_file}: no plan of a run")
    return raw


def _device_id() -> int:
    """Of this rank, as msrun or its rank table says."""
    member = membership()
    assert member is not None
    return device_of(member, 0)


def _tell(
    sender: Sender | None, exit_code: int, message: str, hint: str = "", trace: str = ""
) -> int:
    """Report a failure and leave at once: MindSpore's own end would wait for the other ranks."""
    if sender is not None:
        sender.error(exit_code, message, hint, trace)
    print(f"error: {message}\n{trace}", file=sys.stderr, flush=True)
    os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main())
