"""compare_backend=: the same text with another backend, in a process of its own.

python -m lite_runner.evaluation.other_backend < job.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner.evaluation.options import EvalOptions
from lite_runner.evaluation.planning import plan_evaluation
from lite_runner.evaluation.scored import Scored, score
from lite_runner.output.report import RunFolder
from lite_runner.plan.other_backend import ask_other, start
from lite_runner.system import own_process

PROGRAM = "lite_runner.evaluation.other_backend"


def other_backend(config: EvalOptions, folder: Path) -> Scored:
    """What compare_backend= makes of the text. Raises RunnerError where it fails."""
    return Scored.from_dict(ask_other(PROGRAM, config, folder)["scored"])


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The likelihoods of a job. Raises RunnerError."""
    began = time.perf_counter()
    start(job)
    plan = plan_evaluation(EvalOptions.from_dict(job["config"]))
    scored = score(plan, RunFolder(Path(job["folder"])), began, keep=True)
    return {"scored": scored.to_dict()}


if __name__ == "__main__":
    sys.exit(own_process.serve(answer))
