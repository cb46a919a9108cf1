"""A job of several ranks: starts msrun, supervises the ranks, raises a failure as one error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import field
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]

from lite_runner import progress
from lite_runner.config.parallel import SOCKET_VARIABLE
from lite_runner.config.sections import Cluster, Parallel
from lite_runner.distributed import msrun
from lite_runner.distributed.events import Event, RankMonitor
from lite_runner.distributed.stopping import STOP_FILE, STOP_S, StopFlags, stop_on_ctrl_c
from lite_runner.errors import (
    EXIT_ARTIFACT,
    EXIT_CONFIG,
    EXIT_ENVIRONMENT,
    ArtifactError,
    ConfigError,
    EnvironmentFault,
    RunnerError,
)
from lite_runner.records import dataclass
from lite_runner.system import environment, memory
from lite_runner.system.files import temporary_folder
from lite_runner.system.signals import deferred

TICK_S = 0.1
SCHEDULER_POLL_S = 1.0
MAX_UNANSWERED = 5  # polls in a row
MAX_SUSPENDED = 5  # polls in a row
MSRUN_POLL_S = 2.0  # msrun polls its ranks once a second
MSRUN_EXTRA_S = 30  # added to its timeout: our message names the rank, msrun's does not
MESSAGE_LINES = 4
STOPPING = "the ranks stop and write what there is; Ctrl-C once more ends them at once"
_KINDS: dict[int, type[RunnerError]] = {
    EXIT_CONFIG: ConfigError,
    EXIT_ENVIRONMENT: EnvironmentFault,
    EXIT_ARTIFACT: ArtifactError,
}
_RANK_ENDED = re.compile(r"Worker process (\d+) exit with exception. Error code: (-?\d+)")
LOG_LINES = 8  # of a log or traceback in a message
KILL_TIMEOUT_S = 8.0
EXIT_S = 20.0  # for ranks that are done to exit by themselves


@dataclass(frozen=True)
class Limits:
    """Timeouts of a job, in seconds."""

    rendezvous: int  # until all ranks have joined
    total: int | None = None  # until all are done; None: unlimited
    exit: float = 0.0  # for ranks that are done to exit by themselves; MindSpore is slow at it


def run_ranks(
    program: Sequence[str],
    cluster: Cluster,
    folder: Path,
    limits: Limits,
    *,
    log_dir: Path | None = None,
    rank_table_file: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run `program`, a .py file and its arguments, as each of this machine's ranks, to the end.

    A rank reports through lite_runner.distributed.events, and may log to `folder`/rank_N.log; its
    output goes to `log_dir`, by default `folder`/msrun. `variables` are added to the environment of
    the ranks. Raises one RunnerError, of the kind that the first rank to fail reported, or
    KeyboardInterrupt; no process is left behind in any case.

    Ctrl-C kills all ranks. Only while they generate, all on this machine, the first Ctrl-C gives
    them STOP_S to write their partial results.
    """
    log_dir = log_dir or folder / "msrun"
    msrun.make_logs(log_dir, cluster)
    port = msrun.choose_port(cluster)
    command = msrun.command(
        program,
        cluster,
        log_dir,
        port=port,
        rendezvous_timeout=limits.rendezvous + MSRUN_EXTRA_S,
        rank_table_file=rank_table_file,
    )
    with temporary_folder() as private:
        events = private / "events"
        flags = None
        if cluster.local_worker_num == cluster.worker_num:
            flags = StopFlags.create(events.with_name(STOP_FILE), cluster.worker_num)
        with closing(RankMonitor(events, cluster.local_ranks)) as monitor:
            try:
                with (log_dir / msrun.LOG).open("wb") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=msrun.environment(events, folder, cluster, variables),
                        start_new_session=True,  # Ctrl-C is this process's to handle
                    )
                _Job(
                    monitor=monitor,
                    flags=flags,
                    process=process,
                    cluster=cluster,
                    port=port,
                    folder=folder,
                    log_dir=log_dir,
                    limits=limits,
                ).follow()
            finally:
                with deferred():
                    progress.status("")
                    kill_all(events)


def run_of_config(
    program: Sequence[str],
    cluster: Cluster,
    parallel: Parallel,
    device_target: str,
    folder: Path,
    variables: Mapping[str, str],
) -> None:
    """`run_ranks` by a config's sections; on Ascend each rank gets its device."""
    from lite_runner.distributed.rank_table import rank_variables, read_rank_table

    on_ascend = environment.resolve_device(device_target) == "Ascend"
    table = (parallel.rank_table_file if on_ascend else "") or ""
    if on_ascend:
        rank_table = read_rank_table(Path(table)) if table else None
        variables = {**variables, **rank_variables(cluster, rank_table, parallel.hccl_timeout)}
    # Devices must be released, and other machines use the scheduler; on CPU nothing is left.
    exit_s = EXIT_S if on_ascend or cluster.local_worker_num < cluster.worker_num else 0.0
    run_ranks(
        *(program, cluster, folder, Limits(parallel.rendezvous_timeout, parallel.timeout, exit_s)),
        log_dir=Path(parallel.log_dir).expanduser().absolute() if parallel.log_dir else None,
        rank_table_file=table,
        variables=variables,
    )


@dataclass(kw_only=True, eq=False)
class _Job:
    """A running msrun and the state of its ranks."""

    monitor: RankMonitor
    flags: StopFlags | None
    process: subprocess.Popen[bytes]
    cluster: Cluster
    port: int
    folder: Path
    log_dir: Path
    limits: Limits
    stop_at: float | None = None  # when Ctrl-C asked the ranks to stop
    scheduler: psutil.Process | None = None  # on node 0, once it has started
    kills_before: int = field(default_factory=lambda: memory.oom_kills())
    unanswered: int = 0  # polls of node 0's scheduler in a row, on other nodes
    suspended: Counter[int] = field(default_factory=Counter)  # polls in a row, of each rank

    def follow(self) -> None:
        """Return when every rank is done. Raises RunnerError, and KeyboardInterrupt."""
        with stop_on_ctrl_c(self.flags):
            self._wait_for_ranks()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self.limits.exit)
        if self.flags is not None and self.flags.stop_requested:
            raise KeyboardInterrupt

    def _wait_for_ranks(self) -> None:
        started = polled = time.monotonic()
        shown = ""
        while not self.monitor.all_done:
            msrun_ended = self.process.poll() is not None
            self.monitor.read(TICK_S)
            if self.monitor.failure is not None:
                raise self._failed(self.monitor.failure)
            if msrun_ended and not self.monitor.all_done:
                raise self._msrun_ended()
            self._check_time(time.monotonic() - started)
            self._check_stop()
            status = self.monitor.status() if self.stop_at is None else STOPPING
            if status != shown:
                progress.status(status)
                shown = status
            if self.cluster.is_master and self.scheduler is None:
                self.scheduler = scheduler_of(self.process.pid)  # it may end before the next poll
            if time.monotonic() - polled > SCHEDULER_POLL_S:
                self._check_suspended()
                if self.cluster.is_master:
                    self._check_scheduler()
                elif self.monitor.all_met:
                    self._check_master()
                polled = time.monotonic()

    def _check_stop(self) -> None:
        """Ranks that do not stop in time are killed."""
        if self.flags is None or not self.flags.stop_requested:
            return
        self.stop_at = self.stop_at or time.monotonic()
        if time.monotonic() - self.stop_at > STOP_S:
            progress.note(f"the ranks did not stop within {STOP_S:.0f} s and were ended")
            raise KeyboardInterrupt

    def _check_suspended(self) -> None:
        """The others wait for a rank that a signal has suspended; the scheduler loses it after some
        30 s, and does not name it."""
        for rank, state in self.monitor.ranks.items():
            if state.done or state.pid is None or not is_suspended(state.pid):
                self.suspended[rank] = 0
                continue
            self.suspended[rank] += 1
            if self.suspended[rank] >= MAX_SUSPENDED:
                raise RunnerError(
                    f"rank {rank} (process {state.pid}) has been suspended by a signal, such as"
                    " SIGSTOP; the others wait for it",
                    f"continue it with kill -CONT, within {MAX_SUSPENDED} s",
                )

    def _check_scheduler(self) -> None:
        """The scheduler exits when a rank of any machine is lost, and may be killed; msrun and our
        ranks, which wait for that rank, would not notice."""
        if self.scheduler is None or not has_ended(self.scheduler):
            return
        self.monitor.read(0)  # it also exits when all ranks are done
        if not self.monitor.all_done and self.monitor.failure is None:
            raise self._scheduler_ended(exit_code(self.scheduler.pid))

    def _scheduler_ended(self, code: int | None) -> RunnerError:
        text, kind = scheduler_text(code, tail(self._log("scheduler"))), RunnerError
        hint = "see the logs of the other machines" if code is None or code >= 0 else ""
        if lacking := memory.killed(code, self.kills_before):
            text, kind, hint = f"{text}; {lacking}", EnvironmentFault, memory.TAKE_LESS
        return kind("\n".join([text, *self._log_lines(self._log("scheduler"))]), hint)

    def _check_master(self) -> None:
        """Without the scheduler the ranks of this machine would wait forever."""
        if msrun.answers(self.cluster.master_addr, self.port):
            self.unanswered = 0
            return
        self.unanswered += 1
        self.monitor.read(0)
        if self.unanswered >= MAX_UNANSWERED and not self.monitor.all_done:
            raise RunnerError(
                f"the machine with node_rank 0 ({self.cluster.master_addr}:{self.port}) has ended"
                " the job or cannot be reached",
                "see its message",
            )

    def _check_time(self, seconds: float) -> None:
        if self.limits.total is not None and seconds > self.limits.total:
            raise self._too_slow(
                f"the job took longer than parallel.timeout={self.limits.total} s",
                "a larger parallel.timeout=, or null for none",
            )
        if not self.monitor.all_met and seconds > self.limits.rendezvous:
            raise self._too_slow(
                "the ranks did not join within"
                f" parallel.rendezvous_timeout={self.limits.rendezvous} s",
                "is every machine started, with the same parallel.master_addr and master_port?",
            )

    def _too_slow(self, message: str, hint: str) -> RunnerError:
        rank = self.monitor.slowest()
        state = self.monitor.ranks[rank]
        silent = time.monotonic() - state.last_event_at
        lines = [
            message,
            f"  rank {rank} has been silent for {silent:.0f} s; last: {state.stage}",
            *self._log_lines(self._log(f"worker_{rank}")),
        ]
        return RunnerError("\n".join(lines), hint)

    def _failed(self, failure: Event) -> RunnerError:
        """The error that the rank sent or, without one, msrun's log."""
        if not failure.message:
            return self._lost(failure)
        kind = _KINDS.get(failure.exit_code, RunnerError)
        own = self.folder / f"rank_{failure.rank}.log"
        log = own if own.is_file() else self._log(f"worker_{failure.rank}")
        message = failure.message
        if failure.traceback:  # unexpected: MindSpore's messages fill pages, and are in the log
            message = "\n    ".join(message.splitlines()[:MESSAGE_LINES])
        lines = [f"rank {failure.rank}: {message}", *last_lines(failure.traceback), f"  log: {log}"]
        return kind("\n".join(lines), failure.hint)

    def _lost(self, failure: Event) -> RunnerError:
        """The error of a rank that died without a message."""
        ended, deadline = None, time.monotonic() + MSRUN_POLL_S
        while ended is None and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(TICK_S)
            ended = _RANK_ENDED.search(tail(self.log_dir / "msrun.log"))
        if ended is None:
            if self.process.poll() is not None:  # and all its ranks ended with it
                return self._msrun_ended()
            rank, code = failure.rank, None
        else:
            known = self.monitor.rank_of(int(ended[1]))
            rank, code = failure.rank if known is None else known, int(ended[2])
        kind = RunnerError if code is None else _KINDS.get(code, RunnerError)
        lines = [
            f"rank {rank} ended without a message"
            + ("" if code is None else f": {exit_text(code)}")
        ]
        hint = ""
        if lacking := memory.killed(code, self.kills_before):
            kind, hint = EnvironmentFault, memory.TAKE_LESS
            lines[0] += f"; {lacking}"
        elif code == -signal.SIGABRT and memory.reports_out_of_memory(
            tail(self._log(f"worker_{rank}"))
        ):
            kind, hint = EnvironmentFault, memory.TAKE_LESS
        return kind("\n".join([*lines, *self._log_lines(self._log(f"worker_{rank}"))]), hint)

    def _msrun_ended(self) -> RunnerError:
        code = self.process.wait()
        lines = [
            f"msrun ended before its ranks were done: {exit_text(code)}",
            *self._log_lines(self.log_dir / "msrun.log"),
        ]
        return RunnerError("\n".join(lines))

    def _log(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def _log_lines(self, log: Path) -> list[str]:
        return [*last_lines(tail(log)), f"  log: {log}"]


def exit_text(code: int) -> str:
    """An exit code in words; negative: the signal that killed the process."""
    return f"exit code {code}" if code >= 0 else f"killed by {_name(-code)}"


def scheduler_text(code: int | None, log: str) -> str:
    """The reason for a scheduler's end, by its exit code and log; None: not known.

    MindSpore's exits with 1 where a rank of any machine does not answer for some 30 s.
    """
    if code is not None and code < 0:
        return f"the scheduler was ended by signal {-code} ({_name(-code)})"
    if code is None or "timed out node" in log:
        return "the scheduler has lost a rank"
    return f"the scheduler ended before its ranks were done: {exit_text(code)}"


def tail(log: Path) -> str:
    """The last 64 KiB of a log; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 16)))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str) -> list[str]:
    """The last LOG_LINES lines that are not empty, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [f"    {line}" for line in lines[-LOG_LINES:]]


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def job_processes(events: Path) -> list[psutil.Process]:
    """Every live process of the job whose launcher listens on the socket `events`."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(SOCKET_VARIABLE) == str(events)
            if ours and not has_ended(process):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or already gone
            continue
    return found


def scheduler_of(msrun: int) -> psutil.Process | None:
    """The scheduler that the process `msrun` has started; None if it has none."""
    try:
        for child in psutil.Process(msrun).children():
            if child.environ().get("MS_ROLE") == "MS_SCHED":
                return child
    except psutil.Error:  # already gone
        pass
    return None


def has_ended(process: psutil.Process) -> bool:
    """True for a process that has ended or is a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_suspended(pid: int) -> bool:
    """True for a process that a signal has suspended, and none has continued."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def exit_code(pid: int) -> int | None:
    """The exit code of a zombie of this user, as subprocess has it; None if it is none.

    Its parent alone can wait for it; the kernel shows the status to others, too (proc(5)).
    """
    try:
        # The name of the program, in parentheses, may hold anything.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(rest[-1])) if state == "Z" else None
    except (OSError, ValueError):
        return None


def kill_all(events: Path) -> None:
    """Kill the processes of a job until none is left; a note names those that survive.

    SIGKILL at once: a rank inside a collective handles no other signal.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := job_processes(events):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)
        if time.monotonic() > deadline:
            ids = ", ".join(str(process.pid) for process in left)
            progress.note(f"processes that were killed and have not ended: {ids}")
            return
