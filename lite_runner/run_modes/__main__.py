"""The second run of compare_backend=: python -m lite_runner.run_modes < job.json"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.output import RunFolder
from lite_runner.plugins import register_plugins
from lite_runner.run_modes import from_dict, run_mode
from lite_runner.system import own_process


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job of output/comparison.py, whose result.json is the answer. Raises RunnerError."""
    progress.configure(verbosity=0)
    register_plugins(job["plugins"])
    config = from_dict(job["config"])
    mode = run_mode(config.run_mode)
    mode.run(mode.plan(config), RunFolder(Path(job["folder"]), Path(job["values"])))
    return {}


if __name__ == "__main__":
    sys.exit(own_process.serve(answer))
