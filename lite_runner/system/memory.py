"""Memory available to this process, and detection of out-of-memory failures.

Limits are the machine, a container (cgroup v1 or v2, parents included), what a process was told to
take at most, and `ulimit -v`, the address space, which also counts mapped files and reserved
memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from lite_runner.errors import EnvironmentFault

TAKE_LESS = (
    "dry_run=true says what the run needs; fewer sequences at a time, shorter ones or quant= take "
    "less"
)
_LARGE_BLOCK = 4 << 20  # bytes; smaller blocks are reused, so glibc may keep them
# Bytes to which glibc itself raises its limit with the blocks that are freed; it cannot be read.
_USUAL_BLOCK = 32 << 20
_ANY_BLOCK = (1 << 31) - 1  # the most that an int in C can say
# Bytes that must be left to read a text, and for each of its own: libraries in Rust end the process
# where they get none.
_NEEDED, _NEEDED_FOR_BYTE = 32 << 20, 16
# Out-of-memory messages of MindSpore, libc and the dynamic linker.
_SAID = re.compile(
    r"std::bad_alloc|out of memory|cannot allocate memory|not enough memory|memory not enough"
    r"|memory isn't enough|insufficient memory|(?:alloc|malloc)\w*\b.{0,60}\bmemory\b.{0,60}\bfail"
    r"|fail\w* to (?:alloc|malloc)|failed to map segment|memory pool.{0,60}\bfail"
    r"|can't start new thread",
    re.IGNORECASE,
)


_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_bound: int | None = None  # bytes
# malloc's limits that were asked for, in whatever threads: the last one holds.
_asked: list[int] = []
_asking = Lock()


def resident() -> int:
    """Resident set size of this process in bytes."""
    return _kilobytes("self/status", "VmRSS:")


def free_memory() -> int:
    """Bytes available to this process: the least that machine, container and `bound` leave."""
    own = [] if _bound is None else [_bound - resident()]
    return max(0, min([_kilobytes("meminfo", "MemAvailable:"), *_left_in_cgroups(), *own]))


def bound(size: int | None) -> None:
    """Limit the memory of this process to so many bytes; None: the free memory."""
    global _bound
    _bound = size


def peak() -> int:
    """Peak resident set size in bytes of this process and its running children.

    Not getrusage, which begins with what the process that started this one held.
    """
    return sum(_kilobytes(f"{one}/status", "VmHWM:") for one in _family())


def forget_peak() -> None:
    """Let `peak` count from now on. Where the system does not allow it, it goes on as before."""
    for one in _family():
        with suppress(OSError):
            Path(f"/proc/{one}/clear_refs").write_text("5")


def free_addresses() -> int | None:
    """Bytes of address space left by `ulimit -v`; None: it sets no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _kilobytes("self/status", "VmSize:"))


def check_memory(size: int, free: int | None = None) -> None:
    """Raises MemoryError where `ulimit -v` leaves too little to parse and tokenize a text of `size`
    bytes, or where less is `free`, if that is given."""
    left = [one for one in (free_addresses(), free) if one is not None]
    if left and min(left) < _NEEDED + _NEEDED_FOR_BYTE * size:
        raise MemoryError


def oom_kills() -> int:
    """OOM kills in this process's cgroup so far; 0 if the system does not report them."""
    counts = [number_in(folder / "memory.events", "oom_kill") for folder in cgroups()]
    counts += [number_in(folder / "memory.oom_control", "oom_kill") for folder in cgroups("memory")]
    return max((count for count in counts if count is not None), default=0)


def shortage_error(error: BaseException) -> EnvironmentFault | None:
    """The error as an out-of-memory error; None if it is something else."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    if not any(map(_lacks_memory, chain)):
        return None
    cause = next(error for error in chain if _lacks_memory(error))
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    messages = [line for line in lines if _SAID.search(line) and not line.endswith(":")] or lines
    return EnvironmentFault(
        f"not enough memory: {messages[0][:300] if messages else type(cause).__name__}", TAKE_LESS
    )


def reports_out_of_memory(text: str) -> bool:
    """True where a process's output reports out of memory."""
    return _SAID.search(text) is not None


def killed(code: int | None, kills_before: int) -> str:
    """A sign that a process that exited with `code` ran out of memory; "" if there is none.

    `kills_before`: `oom_kills` when it was started.
    """
    if code != -signal.SIGKILL:
        return ""
    if oom_kills() > kills_before:
        return "the system killed it for memory (its cgroup counts a process killed)"
    return (
        "only the system kills like that, or somebody's kill -9: most likely for memory, which the "
        "kernel's log would say (dmesg)"
    )


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Return large freed blocks to the system at once.

    glibc keeps freed blocks of up to 32 MB: after reading and packing a model's tensors one by one,
    a quarter of the memory may be such fragmentation.
    """
    with _malloc_limit(_LARGE_BLOCK):
        yield


@contextmanager
def freed_blocks_kept() -> Iterator[None]:
    """Keep freed blocks of any size for the next ones.

    Each step of a training frees as much as the next one takes; to clear its pages took the system
    a 14th of the time.
    """
    with _malloc_limit(_ANY_BLOCK):
        yield


@contextmanager
def _malloc_limit(size: int) -> Iterator[None]:
    """From which size on blocks are mapped by themselves; of freed memory twice as much is kept, as
    glibc has it. A user's own limits stay."""
    with _asking:
        _asked.append(size)
        _set_malloc_limit(size)
    try:
        yield
    finally:
        with _asking:
            _asked.remove(size)
            _set_malloc_limit(_asked[-1] if _asked else _USUAL_BLOCK)
        return_freed()


def _set_malloc_limit(size: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    own = "MALLOC_MMAP_THRESHOLD_" in os.environ or "MALLOC_TRIM_THRESHOLD_" in os.environ
    tuned = re.search(r"malloc\.(mmap|trim)_threshold", os.environ.get("GLIBC_TUNABLES", ""))
    if mallopt is None or own or tuned:
        return
    of_trim, of_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    if not mallopt(of_threshold, size):  # before glibc 2.35 it has a limit
        mallopt(of_threshold, _USUAL_BLOCK)
    mallopt(of_trim, min(2 * size, _ANY_BLOCK))


def bound_arenas(most: int) -> None:
    """Let malloc have so many arenas, where it is glibc's: a thread's own reserves 64 MiB of
    addresses, and keeps what other threads have freed in it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, most)  # M_ARENA_MAX of malloc.h


def return_freed() -> None:
    """Return freed blocks that malloc keeps to the system, if it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# psutil knows all of these, but its import takes a hundredth of a second of every run.
def _kilobytes(file: str, key: str) -> int:
    """Bytes by a line of a file in /proc, which has kB; 0 where it has none."""
    return 1024 * (number_in(Path("/proc", file), key) or 0)


def _family() -> list[str]:
    """This process and all that it and they have started."""
    children: dict[str, list[str]] = {}
    for process in os.scandir("/proc"):
        if process.name.isdigit():
            with suppress(OSError):  # it has just ended
                state = Path(process.path, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(state[1], []).append(process.name)
    found = [str(os.getpid())]
    for one in found:
        found += children.get(one, [])
    return found


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError | OSError) and reports_out_of_memory(
        str(error)
    )


def _left_in_cgroups() -> Iterator[int]:
    """Bytes left below each cgroup limit of this process."""
    for folder in cgroups():
        limit, used = number_in(folder / "memory.max"), number_in(folder / "memory.current")
        if limit is not None and used is not None:
            # File pages count as used but are reclaimable, except those of tmpfs.
            stat = folder / "memory.stat"
            given_back = (number_in(stat, "file") or 0) - (number_in(stat, "shmem") or 0)
            yield limit - used + max(0, given_back)
    for folder in cgroups("memory"):
        limit = number_in(folder / "memory.limit_in_bytes")
        used = number_in(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            stat = folder / "memory.stat"
            given_back = (number_in(stat, "total_cache") or 0) - (
                number_in(stat, "total_shmem") or 0
            )
            yield limit - used + max(0, given_back)


def cgroups(controller: str = "") -> list[Path]:
    """This process's cgroup and its parents, of a `controller` of version 1, or of version 2; in a
    container possibly only the mount."""
    mount = _MOUNT / controller
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return [mount]
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    inner = mount / own.lstrip("/")
    return [inner, *(above for above in inner.parents if above.is_relative_to(mount))]


def number_in(file: Path, key: str = "") -> int | None:
    """The number in a file, or of a `key` in it; None if there is none, e.g. "max"."""
    try:
        text = file.read_text()
        if not key:
            return int(text)
        return next(int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key)
    except (OSError, ValueError, IndexError, StopIteration):
        return None
