"""The Python interpreter with MindFormers 1.0.2.

The mindspore of its time is built for Python 3.9 at most, and cannot share a process with ours.
"""

from __future__ import annotations

from lite_runner.backends.workers.python import WorkerPython

RELEASE = "1.0.2"
MINDFORMERS = WorkerPython(
    product=f"MindFormers {RELEASE}",
    variable="LITE_RUNNER_MINDFORMERS_PYTHON",
    folder=".venv-mindformers",
    cached="mindformers",
    target="mindformers",
    elsewhere="with a Python 3.9: python3.9 -m venv {cached} && {cached}/bin/pip install "
    "mindformers==1.0.2 mindspore==2.0.0 numpy==1.24.4 protobuf==3.20.3 pillow==9.5.0",
)
