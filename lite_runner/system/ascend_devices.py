"""The three ids of an Ascend device and where each is used.

- The physical id is N of /dev/davinciN; rank tables use it.
- The logical id numbers the devices that the machine or container shows, from 0;
  ASCEND_RT_VISIBLE_DEVICES lists it, ascending. Outside containers it equals the physical id.
- The index is the position among the devices visible to a process; MindSpore's set_device takes it.
  Without ASCEND_RT_VISIBLE_DEVICES it equals the logical id.

(CANN 9.0: rank tables, hcclug_000067; aclrtGetPhyDevIdByUserDevId; envref_07_0028. That a container
counts its devices in the order of their physical numbers is not said there.)
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence

from lite_runner.errors import EnvironmentFault

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
