"""MindIR versions that a MindSpore Lite supports, and the error for one that it does not.

A MindSpore Lite release reads the MindIR versions of the MindSpore release of the same number, and
older ones. Sources: tests/ascend/lite.yaml.
"""

from __future__ import annotations

import re
from pathlib import Path

from lite_runner.errors import EnvironmentFault
from lite_runner.mindir.wire import mindir_version

# MindSpore Lite up to this release reads MindIR up to this version. Unknown for 2.5.
LAST: dict[tuple[int, int], int] = {(2, 2): 1, (2, 4): 2}
# The first release known to read a version.
FIRST: dict[int, str] = {1: "2.0", 2: "2.4", 3: "2.6"}
_REFUSED = re.compile(r"maximum mind ir version: (\d+).*?mind ir version: (\d+)")


def last_version(lite: str) -> int | None:
    """The newest MindIR version that a MindSpore Lite (name and release) is known to read; None:
    unknown."""
    found = re.search(r"(\d+)\.(\d+)", lite)
    number = (int(found[1]), int(found[2])) if found else None
    return next((last for upto, last in LAST.items() if number and number <= upto), None)


def check_reads(lite: str, version: int) -> None:
    """Raise EnvironmentFault if a MindSpore Lite is known not to read a MindIR version."""
    last = last_version(lite)
    if last is not None and version > last:
        raise _too_new(f"this MindSpore writes MindIR version {version}", version, lite, last)


def refused(path: Path, said: str, lite: str) -> EnvironmentFault | None:
    """The error if a MindSpore Lite did not load a file because of its MindIR version; None for
    another reason. `said`: Lite's message, which may omit the versions."""
    words = _REFUSED.search(said)
    last = int(words[1]) if words else last_version(lite)
    version = int(words[2]) if words else mindir_version(path)
    if last is None or version is None or version <= last:
        return None
    return _too_new(f"{path}: MindIR version {version}", version, lite, last)


def _too_new(what: str, version: int, lite: str, last: int) -> EnvironmentFault:
    wanted = "the MindSpore Lite of the release that wrote it"
    if version in FIRST:
        wanted = f"MindSpore Lite {FIRST[version]} or newer"
    return EnvironmentFault(
        f"{what}, but {lite} reads at most version {last}",
        f"install {wanted}, or choose engine=graph-cell",
    )
