"""Releases of MindSpore Lite: the public one's Python and converter, the MindIR that each reads.

The public mindspore-lite is built for CPython 3.7, and its libraries conflict with MindSpore's in
one process: so it has its own interpreter. A release reads the MindIR versions of the MindSpore
release of the same number, and older ones. Sources: tests/ascend/lite.yaml.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from lite_runner.backends.workers.python import (
    WorkerPython,
    isolated,
    quoted_tail,
    worker_environment,
)
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.mindir.manifest import AGAIN
from lite_runner.mindir.skim import mindir_version
from lite_runner.system.files import temporary_folder

LITE = WorkerPython(
    product="MindSpore Lite",
    variable="LITE_RUNNER_LITE_PYTHON",
    folder=".venv-lite",
    cached="lite",
    target="lite",
    elsewhere="with a Python 3.7: python3.7 -m venv {cached} && {cached}/bin/pip install "
    "mindspore-lite==2.0.0",
)


CONVERT_SECONDS = 3600.0  # timeout, in case it hangs
_SUCCESS = "CONVERT RESULT SUCCESS"
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


def refused(path: Path, message: str, lite: str) -> EnvironmentFault | None:
    """The error if a MindSpore Lite did not load a file because of its MindIR version; None for
    another reason. `message`: Lite's message, which may omit the versions."""
    words = _REFUSED.search(message)
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


def convert_to_ms(mindir: Path, target: Path, *, weight_fp16: bool) -> None:
    """Write `target` (.ms; above 2 GB an .msw beside it) from a MindIR that Lite can load.

    The files are renamed into place when complete. Raises ArtifactError if the conversion fails,
    whatever its exit code, EnvironmentFault if there is no Lite, it is too old for the file, or the
    disk is full.
    """
    if target.suffix != ".ms":
        raise ArtifactError(f"{target}: the name of a Lite model ends in .ms")
    if not mindir.is_file():
        raise ArtifactError(f"{mindir}: no such file", AGAIN)
    python = LITE.find()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target.name, target.parent) as folder:
            _convert(python, mindir.resolve(), target.stem, folder, weight_fp16)
            # The .ms goes last, so that its weights are there when it appears. It contains the
            # name of their file, so both were written under their final names.
            for path in sorted(folder.iterdir(), key=lambda path: path.suffix == ".ms"):
                path.chmod(0o644)  # the converter makes it readable by the owner only
                _sync(path)
                path.replace(target.parent / path.name)
    except OSError as error:
        raise EnvironmentFault(f"{target}: cannot be written: {error}") from error


def _convert(python: Path, mindir: Path, stem: str, folder: Path, weight_fp16: bool) -> None:
    precision = "float16" if weight_fp16 else "float32"
    script = Path(__file__).with_name("lite_convert.py")
    command = isolated(python, script, str(mindir), stem, precision)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=CONVERT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            f"{mindir}: the converter of MindSpore Lite timed out after {CONVERT_SECONDS:g} s"
        ) from error
    log = done.stdout
    if "No module named 'mindspore_lite'" in log:
        raise EnvironmentFault(
            f"{python}: has no mindspore_lite", "make lite sets up a Python that has it"
        )
    output = folder / f"{stem}.ms"
    if not output.is_file() or not output.stat().st_size:
        reason = "wrote no model"
    elif done.returncode:
        reason = f"ended with exit code {done.returncode}"
    elif "[ERROR]" in log:
        reason = "reports errors"
    elif _SUCCESS not in log:
        reason = "does not report success"
    else:
        return
    if (too_new := refused(mindir, log, "this MindSpore Lite")) is not None:
        raise too_new
    raise ArtifactError(f"{mindir}: the converter of MindSpore Lite {reason}{quoted_tail(log)}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
