"""Which MindIR a MindSpore Lite reads, and what to say of one that it does not.

A MindSpore Lite reads the versions of MindIR that the MindSpore of its own number writes, and
older ones. tests/ascend/lite.yaml has what this was read from.
"""

from __future__ import annotations

import re
from pathlib import Path

from lite_runner.errors import EnvironmentFault
from lite_runner.mindir.wire import mindir_version

# MindSpore Lite up to this release reads MindIR up to this version. Of 2.5 it is not known.
LAST: dict[tuple[int, int], int] = {(2, 2): 1, (2, 4): 2}
# The first release known to read a version.
FIRST: dict[int, str] = {1: "2.0", 2: "2.4", 3: "2.6"}
_REFUSED = re.compile(r"maximum mind ir version: (\d+).*?mind ir version: (\d+)")


def last_version(lite: str) -> int | None:
    """The newest MindIR that a MindSpore Lite, named with its release, is known to read; None:
    not known."""
    found = re.search(r"(\d+)\.(\d+)", lite)
    number = (int(found[1]), int(found[2])) if found else None
    return next((last for upto, last in LAST.items() if number and number <= upto), None)


def check_reads(lite: str, version: int) -> None:
    """Raises EnvironmentFault where a MindSpore Lite is known not to read what is to be written."""
    last = last_version(lite)
    if last is not None and version > last:
        raise _too_new(f"this MindSpore writes MindIR version {version}", version, lite, last)


def refused(path: Path, said: str, lite: str) -> EnvironmentFault | None:
    """The error where a MindSpore Lite did not load a file for the version that it has; None:
    the reason is another. `said`: Lite's own words, which may leave the version out."""
    words = _REFUSED.search(said)
    last = int(words[1]) if words else last_version(lite)
    version = int(words[2]) if words else mindir_version(path)
    if last is None or version is None or version <= last:
        return None
    return _too_new(f"{path}: of MindIR version {version}", version, lite, last)


def _too_new(what: str, version: int, lite: str, last: int) -> EnvironmentFault:
    wanted = "the MindSpore Lite of the release that wrote it"
    if version in FIRST:
        wanted = f"MindSpore Lite {FIRST[version]} or newer"
    return EnvironmentFault(
        f"{what}, but {lite} reads at most version {last}",
        f"install {wanted}, or choose engine=graph-cell",
    )
