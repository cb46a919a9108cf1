"""This machine's processor and devices, and this Python's packages, without importing MindSpore.

The three ids of an Ascend device and where each is used.

- The physical id is N of /dev/davinciN; rank tables use it.
- The logical id numbers the devices that the machine or container shows, from 0;
  ASCEND_RT_VISIBLE_DEVICES lists it, ascending. Outside containers it equals the physical id.
- The index is the position among the devices visible to a process; MindSpore's set_device takes it.
  Without ASCEND_RT_VISIBLE_DEVICES it equals the logical id.

(CANN 9.0: rank tables, hcclug_000067; aclrtGetPhyDevIdByUserDevId; envref_07_0028. That a container
counts its devices in the order of their physical numbers is not said there.)
"""

from __future__ import annotations

import atexit
import configparser
import ctypes
import glob
import hashlib
import importlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import lite_runner
from lite_runner.errors import EXIT_ENVIRONMENT, EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system import memory
from lite_runner.system.signals import deferred, leave_interrupts
from lite_runner.system.user_cache import remembered

_CPUINFO = Path("/proc/cpuinfo")
# Features that matter to products of matrices.
_CPU_FEATURES = re.compile(r"avx2|avx512f|avx512_vnni|avx_vnni|amx_int8|amx_bf16|asimddp|i8mm|sve")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
PLUGINS = "lite_runner.plugins"  # entry points: a module, which registers when it is imported


def physical_ids() -> list[int]:
    """Physical ids of the devices that the driver shows, ascending."""
    found = (re.fullmatch(r"/dev/davinci(\d+)", path) for path in glob.glob("/dev/davinci*"))
    return sorted(int(match[1]) for match in found if match)


def seen_ids(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Logical ids of the devices visible to a process with this environment, by index.

    Like CANN's runtime this stops at the first invalid entry.
    """
    count = len(physical_ids())
    asked = environ.get(VISIBLE, "")
    if not asked:
        return list(range(count))
    seen: list[int] = []
    for word in asked.split(","):
        if not (word.isascii() and word.isdecimal()) or int(word) >= count:
            break
        seen.append(int(word))
    return seen


def visible_devices(ids: Sequence[int], environ: Mapping[str, str] = os.environ) -> str:
    """ASCEND_RT_VISIBLE_DEVICES for processes on the devices with physical `ids`.

    Raises EnvironmentFault if `environ` hides one of them, or the machine lacks it.
    """
    return ",".join(map(str, sorted(_logical_ids(ids, environ))))


def index_of(device_id: int, environ: Mapping[str, str] = os.environ) -> int:
    """MindSpore's index of a device, by physical id, in a process with `environ`.

    Raises EnvironmentFault if the process does not see it.
    """
    (logical,) = _logical_ids([device_id], environ)
    return seen_ids(environ).index(logical)


def _logical_ids(ids: Sequence[int], environ: Mapping[str, str]) -> list[int]:
    shown = physical_ids()
    if missing := [device_id for device_id in ids if device_id not in shown]:
        raise EnvironmentFault(
            f"the rank table has device {_listed(missing)} for this machine, which shows"
            f" {_listed(shown) or 'none'} (/dev/davinci*)",
            "give the rank table of this job and machine; in a container the numbers are those of"
            " the hardware: scripts/hccl_tools.py --visible_devices",
        )
    logical = [shown.index(device_id) for device_id in ids]
    seen = seen_ids(environ)
    if hidden := [device for device in logical if device not in seen]:
        raise EnvironmentFault(
            f"{VISIBLE}={environ[VISIBLE]} hides device {_listed(hidden)} of the rank table",
            f"unset {VISIBLE}: the rank table says which devices are used",
        )
    return logical


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


# They make a process a rank of a job.
RANK_VARIABLES = (
    *("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT"),
    *("MS_TOPO_TIMEOUT", "MS_SIMULATION_LEVEL", "MS_ENABLE_RECOVERY"),
    *("RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "DEVICE_ID"),
    *("MS_SERVER_NUM", "MS_LOCAL_WORKER", "MS_NODE_RANK"),  # of ascend-operator
)


# Atlas A2 (Ascend910B1 and on) and A3 (Ascend910_9391 and on), by the names that CANN gives them.
# Processors of Atlas 800 are called Ascend910A, Ascend910B and Ascend910ProA.
_FUSED = re.compile(r"Ascend910(B\d|_93)")


def import_mindspore() -> None:
    """Import it before anything that needs it; Ctrl-C stays Python's.

    Raises EnvironmentFault where it is not installed, or broken.
    """
    check_mindspore()
    try:
        with deferred():  # half imported, it ends the process with an abort
            mindspore = importlib.import_module("mindspore")
    except Exception as error:  # a shared library is missing, or made for another processor, ...
        if "mindspore._c_expression" in sys.modules:
            atexit.register(_leave)  # runs before MindSpore's own, which then aborts the process
        if (lacking := memory.shortage_error(error)) is not None:
            raise lacking from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFault(
            f"mindspore {installed('mindspore')} is installed, but importing it fails: {reason[0]}",
            reinstall_line("mindspore"),
        ) from error
    leave_interrupts(Path(mindspore.__file__ or "").parent)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_ENVIRONMENT)


def ascend_devices() -> int:
    """The number of Ascend processors that this process may use."""
    return len(seen_ids())


@cache
def ascend_soc() -> str:
    """The Ascend processor of this machine, as CANN names it: Ascend910B3.

    Raises EnvironmentFault without CANN, which MindSpore needs there too.
    """
    try:
        query = ctypes.CDLL("libascendcl.so").aclrtGetSocName
    except (OSError, AttributeError) as error:
        raise EnvironmentFault(
            f"this machine shows Ascend devices, but CANN cannot be loaded: {error}",
            "source the set_env.sh of its toolkit, or context.device_target=CPU",
        ) from error
    query.restype = ctypes.c_char_p
    name: bytes | None = query()
    if not name:
        raise EnvironmentFault(
            "CANN does not tell which Ascend processor this is (aclrtGetSocName)",
            "check driver and firmware with npu-smi info, or context.device_target=CPU",
        )
    return name.decode()


def has_fused_operators(device: str) -> bool:
    """True where a device of this machine ("CPU" or "Ascend") has MindSpore's fused operators:
    attention over a paged cache, and products of integers. Raises EnvironmentFault as `ascend_soc`.
    """
    return device == "Ascend" and _FUSED.match(ascend_soc()) is not None


def resolve_device(wanted: str, *, several: bool = False, planned: bool = False) -> str:
    """`auto` becomes Ascend where there is one, else CPU; `several` are wanted of it. What is only
    `planned` may be for another machine.

    Raises EnvironmentFault where there is none.
    """
    if wanted == "Ascend" and not planned and not ascend_devices():
        one = ", and in one process with use_parallel=false" if several else ""
        raise EnvironmentFault(
            "context.device_target: got Ascend, but this machine shows no Ascend device",
            f"run on the processor with context.device_target=CPU (or --device_target CPU){one}",
        )
    if wanted == "auto":
        return "Ascend" if ascend_devices() else "CPU"
    return wanted


PACKAGE = Path(__file__).resolve().parent.parent
_OWN = "mindspore-lite-runner"
_NAMESAKE = "lite-runner"  # another project's, with modules in lite_runner/ too; once our name
_OUR_PROGRAM = "run-lite"
# Optional: backend=native computes without it.
MINDSPORE = "mindspore"
_CHECKOUT = Path(__file__).resolve().parents[2]
_BOUND = re.compile(r"(>=|<)(\d+(?:\.\d+)*)")  # the only two operators that setup.cfg uses
_REQUIREMENT = re.compile(
    rf"([\w.-]+?(?:\[[\w,-]+\])?)\(?((?:{_BOUND.pattern},?)*)\)?"
)  # without spaces
# The one condition that it has: on another Python the requirement is left out.
_PYTHON = re.compile(r"python_version(<|>=)[\"'](\d+)\.(\d+)[\"']")
_RELEASE = re.compile(r"v?(?:\d+!)?(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Requirement:
    """A package and the versions that lite-runner runs with."""

    name: str  # with the extras of it that are meant: ray[serve]
    bounds: str  # ">=1.25,<2"; "": any version

    def __str__(self) -> str:
        return f"{self.name}{self.bounds}"

    def allows(self, version: str) -> bool:
        """True for a version within the bounds. A pre-release counts as what it precedes."""
        found = _release(version)
        if found is None:
            return False
        for operator, number in _BOUND.findall(self.bounds):
            bound = _release(number)
            assert bound is not None
            if (found < bound) if operator == ">=" else (found >= bound):
                return False
        return True


def required(extra: str = "") -> list[Requirement]:
    """Each package of setup.cfg in a checkout, else of the installed lite-runner's metadata; none
    where there is neither. `extra`: those of an extra instead."""
    lines = _extra_lines(extra) if extra else _lines("install_requires", "Requires-Dist")
    texts = (re.sub(r"\s", "", line).partition(";") for line in lines)
    return [_requirement(text) for text, _, condition in texts if _applies(condition)]


def required_python() -> Requirement:
    """The Python that lite-runner runs with, from the same place."""
    bounds = ",".join(_lines("python_requires", "Requires-Python"))
    return _requirement(f"python{bounds}")


def installed(name: str) -> str | None:
    """The version of a package, whatever its extras; None where it is not installed or has no
    version."""
    from importlib import metadata  # with its imports 20 ms

    try:
        # Not metadata.version(): parsing the whole file takes longer than all that is done here.
        return next(_fields(name.partition("[")[0], "Version"), None)
    except metadata.PackageNotFoundError:
        return None


def namesake() -> str:
    """Another project's installed package whose modules are in lite_runner/ too; "" without one."""
    return str(remembered(f"namesake of {sys.prefix}", packages_state(), _namesake))


def _namesake() -> str:
    from importlib import metadata

    try:
        found = metadata.distribution(_NAMESAKE)
    except metadata.PackageNotFoundError:
        return ""
    if any(one.name == _OUR_PROGRAM for one in found.entry_points):
        return ""  # ours, of an earlier checkout
    return (
        f"{_NAMESAKE} {installed(_NAMESAKE)}, another project's package, is installed in this"
        " Python, and has files in lite_runner/ as well"
    )


def without_namesake() -> str:
    """The commands that take the namesake away, and bring back the files that it replaced."""
    python = shlex.quote(sys.executable)
    remove = f"{python} -m pip uninstall --yes {_NAMESAKE}"
    if not installed(_OWN):  # it runs in its checkout
        return remove
    place = f"--editable {shlex.quote(str(_CHECKOUT))}" if _setup() else ". (in its checkout)"
    return f"{remove}; {python} -m pip install --force-reinstall --no-deps {place}"


def packages_state() -> str:
    """Changes when a package is installed, replaced or removed where this Python looks."""
    found = [f"{sys.prefix} {sys.version}"]
    for folder in sys.path:
        with suppress(OSError):
            found.append(f"{folder} {Path(folder).stat().st_mtime_ns}")
    return "\n".join(found)


def has_plugins() -> bool:
    """True if an installed package is a plugin."""
    return bool(remembered(f"plugins of {sys.prefix}", packages_state(), _has_plugins))


def _has_plugins() -> bool:
    from importlib.metadata import entry_points  # with its imports 20 ms

    return bool(entry_points(group=PLUGINS))


def unmet(extra: str = "") -> dict[Requirement, str | None]:
    """The requirements that this Python does not meet, and the version that each has instead."""
    found = {one: installed(one.name) for one in required(extra)}
    return {one: has for one, has in found.items() if has is None or not one.allows(has)}


def check_packages(extra: str = "") -> None:
    """Raises EnvironmentFault, with the install line, where a required package, or one of an
    extra, is missing or of another version; see `check_mindspore` for a missing MindSpore. It is
    checked again when packages have changed."""
    wanted = "\n".join([packages_state(), *map(str, required(extra))])
    if not remembered(f"packages {extra} of {sys.prefix}", wanted, lambda: not unmet(extra)):
        wrong = unmet(extra)
        _raise_unmet(
            {one: has for one, has in wrong.items() if (one.name, has) != (MINDSPORE, None)}
        )


def check_mindspore() -> None:
    """Raises EnvironmentFault, with the command that installs it, where MindSpore is not."""
    if installed(MINDSPORE) is None:
        raise EnvironmentFault(f"{MINDSPORE} is not installed in this Python", mindspore_line())


def mindspore_line() -> str:
    """The command that adds MindSpore to this Python: pinned, where `make run` has made it."""
    wanted = [one for one in required() if one.name in (MINDSPORE, "numpy")]  # see install_line
    if all(one.name != MINDSPORE for one in wanted):
        return "there is none for this Python: set up another environment, with Python 3.10 to 3.12"
    if _setup() is not None and Path(sys.prefix) == _CHECKOUT / ".venv":
        return shlex.join(["make", "-C", str(_CHECKOUT), MINDSPORE])
    return install_line(wanted)


def _raise_unmet(wrong: Mapping[Requirement, str | None]) -> None:
    if not wrong:
        return
    unmet = [
        f"{one.name} is not installed in this Python"
        if has is None
        else f"{one.name} {has} is installed, expected {one.bounds}"
        for one, has in wrong.items()
    ]
    raise EnvironmentFault("; ".join(unmet), install_line(wrong))


def install_line(requirements: Iterable[Requirement], *options: str) -> str:
    """The command that installs them in this Python. All that are unmet belong in one: MindSpore
    alone would bring a NumPy that it does not run with."""
    words = [*options, *(f'"{one}"' for one in requirements)]
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(words)}"


def reinstall_line(name: str) -> str:
    """The command that installs a broken package again, and nothing else."""
    wanted = (one for one in required() if one.name == name)
    return install_line(wanted, "--force-reinstall", "--no-deps")


def _lines(option: str, field: str) -> Iterator[str]:
    """The values of an option of setup.cfg, or of a field of the metadata; extras are left out."""
    parser = _setup()
    if parser is not None:
        yield from _values(parser.get("options", option, fallback=""))
        return
    yield from (line for line in _own_fields(field) if "extra ==" not in line)


def _extra_lines(extra: str) -> Iterator[str]:
    parser = _setup()
    if parser is not None:
        yield from _values(parser.get("options.extras_require", extra, fallback=""))
        return
    for line in _own_fields("Requires-Dist"):
        requirement, _, condition = line.partition(";")
        if re.fullmatch(rf"\s*extra == ['\"]{re.escape(extra)}['\"]\s*", condition):
            yield requirement


def _setup() -> configparser.ConfigParser | None:
    """The setup.cfg of a checkout; None where this is none."""
    parser = configparser.ConfigParser()
    try:
        parser.read(_CHECKOUT / "setup.cfg", encoding="utf-8")
    except (OSError, ValueError, configparser.Error):
        return None
    return parser if parser.get("metadata", "name", fallback="") == _OWN else None


def _values(text: str) -> Iterator[str]:
    yield from (line for line in text.splitlines() if line.strip() and line.strip()[0] != "#")


def _own_fields(name: str) -> Iterator[str]:
    """The fields of the installed lite-runner's metadata; none if it is not installed."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        yield from _fields(_OWN, name)


def _fields(package: str, name: str) -> Iterator[str]:
    """The values of a field of an installed package's metadata; PackageNotFoundError without it."""
    from importlib import metadata

    found = metadata.distribution(package)
    texts = (found.read_text(file) for file in ("METADATA", "PKG-INFO", ""))  # new, old, oldest
    head = next(filter(None, texts), "").partition("\n\n")[0]  # behind it stands the description
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == name:
            yield value.strip()


def _applies(condition: str) -> bool:
    """False where a requirement is for another Python. `condition`: without spaces; "" for all."""
    if not condition:
        return True
    match = _PYTHON.fullmatch(condition)
    if match is None:
        raise EnvironmentFault(
            f"{_OWN} requires a package where {condition!r}, expected python_version < or >=",
            "install it again",
        )
    older = sys.version_info < (int(match[2]), int(match[3]))
    return older == (match[1] == "<")


def _requirement(text: str) -> Requirement:
    """Of a text without spaces."""
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise EnvironmentFault(
            f"{_OWN} requires {text!r}, expected a name with bounds of >= and <", "install it again"
        )
    return Requirement(match[1], match[2])


def _release(version: str) -> tuple[int, ...] | None:
    """The numbers of a version without zeros at its end; None for other texts."""
    match = _RELEASE.match(version)
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def versions() -> dict[str, str]:
    """Versions of the packages that compute, without importing them; absent ones have no entry."""
    found = {"python": platform.python_version(), "lite_runner": lite_runner.__version__}
    others: dict[str, str] = remembered(f"versions in {sys.prefix}", packages_state(), _installed)
    return found | others


def _installed() -> dict[str, str]:
    every = {package: installed(package) for package in ("numpy", "mindspore")}
    return {package: version for package, version in every.items() if version is not None}


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 over paths and contents of all Python files below a folder, 64 hexadecimal digits.

    The whole package counts, not only what builds graphs: a list of modules would go stale. Cached
    for the life of the process, and in the user's cache while sizes and times of the files stay.
    """
    paths = sorted(
        Path(folder, name)
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith(".py") and not name.startswith(".")  # an editor's temporary file
    )
    found = ((path, path.stat()) for path in paths)
    state = "\n".join(f"{path} {one.st_size} {one.st_mtime_ns}" for path, one in found)
    digest: str = remembered(f"code of {package}", state, lambda: _digest(package, paths))
    return digest


def _digest(package: Path, paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


def processor() -> str:
    """The model of the processor, or the kind of machine where the system names none, as on ARM."""
    return _cpuinfo("model name") or platform.machine()


def multiplies_pairs() -> bool:
    """True if pairs of bfloat16 are multiplied by the instruction for them: as pairs_pay of
    native/src/bfloat16.inl."""
    return "avx512_bf16" in _cpuinfo("flags").split() and _cpuinfo("vendor_id") != "GenuineIntel"


def cores(processes: int = 1) -> int:
    """Cores that this process may use: of its affinity, whole ones of its cgroups' CPU quota; or
    how many each of some `processes` that share them, at least one."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    # More threads than the quota are all stopped for the rest of each period once it is used up.
    return max(1, (allowed if quota is None else min(allowed, int(quota))) // processes)


def threads_beyond(threads: int | None, processes: int) -> str:
    """A note where the threads of some processes are more than the CPUs that this one may use; ""
    elsewhere. None: as many threads as there are CPUs for each."""
    if threads is None or threads * processes <= cores():
        return ""
    of_ranks = f" of each of {processes} ranks" if processes > 1 else ""
    return (
        f"context.threads={threads}{of_ranks}: this process may use {cores()} CPU(s), by its"
        " affinity and the CPU quota of its cgroup; more threads than that wait for each other"
        f"\n  -> context.threads={cores(processes)}, or leave it out"
    )


def processor_features() -> list[str]:
    """The processor's vector and matrix instructions, as Linux calls them."""
    found = _cpuinfo("flags") or _cpuinfo("Features")
    return [flag for flag in found.split() if _CPU_FEATURES.fullmatch(flag)]


def _cpuinfo(key: str) -> str:
    """The first value of a key of /proc/cpuinfo; "" where there is none."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":")[::2] for line in lines)
    return next((value.strip() for one, value in pairs if one.strip() == key), "")


def cpu_quota() -> float | None:
    """CPU quota of the cgroups in CPUs, e.g. 1.5; None: no limit."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    for folder in memory.cgroups():
        try:
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # none, or "max 100000"
            continue
        yield quota / period
    for folder in memory.cgroups("cpu"):
        allowed, time = (
            memory.number_in(folder / "cpu.cfs_quota_us"),
            memory.number_in(folder / "cpu.cfs_period_us"),
        )
        if allowed and allowed > 0 and time:  # -1: no limit
            yield allowed / time
