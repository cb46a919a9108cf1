"""What earlier runs have kept on the disk, and the command that empties it."""

from __future__ import annotations

import shlex
from pathlib import Path

from lite_runner.doctor.check import Finding
from lite_runner.sizing.need import readable
from lite_runner.weights.caches import limited_folders
from lite_runner.weights.source import folder_size


def against(limit: str) -> Finding:
    """What compiled graphs and exports take of context.cache_limit."""
    used = readable(sum(map(folder_size, filter(Path.is_dir, limited_folders()))))
    return Finding("ok", f"{used} of {limit} for compiled graphs and exports")


def kept(*folders: Path) -> Finding:
    """The size of what lies in folders of the cache. Emptying them costs time, nothing else."""
    there = [folder for folder in folders if folder.is_dir()]
    size = sum(map(folder_size, there))
    if not size:
        return Finding("ok", "empty")
    remedy = f"to empty it: rm -r {shlex.join(map(str, there))}"
    return Finding("ok", f"{readable(size)} in {', '.join(map(str, there))}", remedy=remedy)
