"""The Python interpreter with MindSpore Lite.

The public mindspore-lite is built for CPython 3.7, and its libraries conflict with MindSpore's in
one process: so it has its own interpreter.
"""

from __future__ import annotations

from pathlib import Path

from lite_runner.backends.workers.python import WorkerPython

VARIABLE = "LITE_RUNNER_LITE_PYTHON"
LITE = WorkerPython(
    product="MindSpore Lite",
    variable=VARIABLE,
    folder=".venv-lite",
    cached="lite",
    target="lite",
    elsewhere="with a Python 3.7: python3.7 -m venv {cached} && {cached}/bin/pip install "
    "mindspore-lite==2.0.0",
)


def find_lite_python() -> Path:
    """The interpreter with mindspore_lite; not started. Raises EnvironmentFault if there is
    none."""
    return LITE.find()
