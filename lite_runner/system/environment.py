"""MindSpore and the devices of this machine, found out without importing it.

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
import ctypes
import glob
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from lite_runner.errors import EXIT_ENVIRONMENT, EnvironmentFault
from lite_runner.system import memory, packages
from lite_runner.system.signals import deferred, leave_interrupts

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


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
# Those of Atlas 800 are called Ascend910A, Ascend910B and Ascend910ProA.
_FUSED = re.compile(r"Ascend910(B\d|_93)")


def check_packages(extra: str = "") -> None:
    """Raises EnvironmentFault, with the install line, where a package is missing or another than
    lite-runner, or its `extra`, requires."""
    packages.check(extra)


def import_mindspore() -> None:
    """Import it before anything that needs it; Ctrl-C stays Python's.

    Raises EnvironmentFault where it is not installed, or broken.
    """
    packages.check_mindspore()
    try:
        with deferred():  # half imported, it ends the process with an abort
            mindspore = importlib.import_module("mindspore")
    except Exception as error:  # a shared library is missing, or made for another processor, ...
        if "mindspore._c_expression" in sys.modules:
            atexit.register(_leave)  # runs before MindSpore's own, which then aborts the process
        if (lacking := memory.fault_of(error)) is not None:
            raise lacking from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFault(
            f"mindspore {packages.installed('mindspore')} is installed, but importing it fails: "
            f"{reason[0]}",
            packages.reinstall_line("mindspore"),
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
