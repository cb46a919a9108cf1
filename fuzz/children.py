"""Reads damaged files in forked children, and says how a child ended that did not go well."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz.values import Mutation, flip_bytes
from lite_runner.errors import RunnerError

MEMORY = 1 << 30  # bytes that reading may take
HANG_S = 20.0  # that one file may take
PLAIN = 0.2  # of the mutations know nothing of the format
AS_IT_IS = -1  # the index of the file without a mutation, which has to be read


@dataclass(frozen=True)
class Case:
    """A file that is damaged, in the folder that a run would find it in."""

    name: str
    folder: Path
    file: str  # below the folder
    mutation: Mutation
    read: Callable[[Path], object]  # reads the folder as a run does
    memory: int = MEMORY

    def damaged(self, seed: int, index: int) -> bytes:
        """The bytes of the file after mutation `index`."""
        data = (self.folder / self.file).read_bytes()
        if index == AS_IT_IS:
            return data
        random = Random(f"{seed}:{self.name}:{index}")
        return (flip_bytes if random.random() < PLAIN else self.mutation)(data, random)


@dataclass(frozen=True)
class Finding:
    """Outcome of reading a damaged file."""

    case: Case
    index: int
    kind: str  # where it happened, the same for the same fault
    detail: str


def run(case: Case, seed: int, indices: range, work: Path) -> list[Finding]:
    """Read the file after each mutation of `indices`. `work` holds the folder as `case` has it."""
    found: list[Finding] = []
    start = indices.start
    while start < indices.stop:
        reached, lines, how = _child(case, seed, range(start, indices.stop), work)
        for line in lines:
            index, kind, detail = json.loads(line)
            found.append(Finding(case, index, kind, detail))
        if how:
            found.append(Finding(case, reached, how, ""))
        start = reached + 1
    return found


def _child(case: Case, seed: int, indices: range, work: Path) -> tuple[int, list[str], str]:
    """The last index that a child came to, its findings, and how it ended ("": well)."""
    reached = mmap.mmap(-1, 8)
    struct.pack_into("<q", reached, 0, indices.start)
    report = work.parent / "findings"
    report.write_bytes(b"")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            _read_all(case, seed, indices, work, reached, report)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    how = _watched(pid, reached)
    (index,) = struct.unpack_from("<q", reached, 0)
    return index, report.read_text().splitlines(), how


def _watched(pid: int, reached: mmap.mmap) -> str:
    """Wait for a child; how it ended."""
    since, last = time.monotonic(), -1
    try:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    return f"killed by {signal.Signals(-code).name}"
                return f"exit {code}" if code else ""
            (index,) = struct.unpack_from("<q", reached, 0)
            if index != last:
                since, last = time.monotonic(), index
            elif time.monotonic() - since > HANG_S:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"hung for more than {HANG_S:g} s"
            time.sleep(0.005)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it has started and left


def _read_all(
    case: Case, seed: int, indices: range, work: Path, reached: mmap.mmap, report: Path
) -> None:
    _bound_memory(case.memory)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    os.chdir(work)
    for index in indices:
        struct.pack_into("<q", reached, 0, index)
        place = work / case.file
        new = place.with_name("new")  # another inode: former views keep what they show
        new.write_bytes(case.damaged(seed, index))
        new.replace(place)
        try:
            case.read(work)
        except BaseException as error:
            if isinstance(error, RunnerError) and index != AS_IT_IS:
                continue
            with report.open("a") as file:
                trace = "".join(traceback.format_exception(error))
                file.write(json.dumps([index, _kind(error), trace[-3000:]]) + "\n")


def _bound_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _kind(error: BaseException) -> str:
    """The exception, and the last line of ours that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "lite_runner" in frame.filename]
    place = ours[-1] if ours else frames[-1]
    name = place.filename.rpartition("lite_runner/")[2]
    return f"{type(error).__name__} at {name}:{place.lineno}"
