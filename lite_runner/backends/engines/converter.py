"""MindIR -> .ms: runs lite_convert.py with the Lite Python, and verifies that it succeeded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lite_runner.backends.engines import mindir_version
from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.backends.workers.python import isolated, quoted_tail, worker_environment
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.system.files import temporary_folder

CONVERT_SECONDS = 3600.0  # timeout, in case it hangs
_SUCCESS = "CONVERT RESULT SUCCESS"


def convert_to_ms(mindir: Path, target: Path, *, weight_fp16: bool) -> None:
    """Write `target` (.ms; above 2 GB an .msw beside it) from a MindIR that Lite can load.

    The files are renamed into place when complete. Raises ArtifactError if the conversion fails,
    whatever its exit code, EnvironmentFault if there is no Lite, it is too old for the file, or the
    disk is full.
    """
    if target.suffix != ".ms":
        raise ArtifactError(f"{target}: the name of a Lite model ends in .ms")
    if not mindir.is_file():
        raise ArtifactError(f"{mindir}: no such file", "export the model again")
    python = find_lite_python()
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
        fault = "wrote no model"
    elif done.returncode:
        fault = f"ended with exit code {done.returncode}"
    elif "[ERROR]" in log:
        fault = "reports errors"
    elif _SUCCESS not in log:
        fault = "does not report success"
    else:
        return
    if (too_new := mindir_version.refused(mindir, log, "this MindSpore Lite")) is not None:
        raise too_new
    raise ArtifactError(f"{mindir}: the converter of MindSpore Lite {fault}{quoted_tail(log)}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
