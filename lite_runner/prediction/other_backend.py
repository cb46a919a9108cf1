"""compare_backend=: the same prompts with another backend, in a process of its own.

python -m lite_runner.prediction.other_backend < job.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner.config.predict_options import ComparedOptions, PredictOptions, SloraOptions
from lite_runner.output.merge import RankResult
from lite_runner.output.report import RunFolder
from lite_runner.plan.generating import plan_generation
from lite_runner.plan.other_backend import ask_other, start
from lite_runner.prediction.comparison import Compared
from lite_runner.prediction.kept_logits import KeptLogits
from lite_runner.prediction.replica import complete_share
from lite_runner.system import own_process

PROGRAM = "lite_runner.prediction.other_backend"


def other_backend(config: ComparedOptions, folder: Path, logits: KeptLogits) -> Compared:
    """What compare_backend= makes of the prompts. Raises RunnerError where it fails."""
    assert config.compare_backend is not None
    answer = ask_other(PROGRAM, config, folder, logits=str(logits.folder))
    return config.compare_backend, RankResult.from_bytes(answer["result"]), logits


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a job, whose logits are written to its folder. Raises RunnerError."""
    began = time.perf_counter()
    start(job)
    kind = PredictOptions if job["config"]["run_mode"] == "predict" else SloraOptions
    config = kind.from_dict(job["config"])
    plan = plan_generation(config)
    assert plan.tokenizer is not None
    folder = RunFolder(Path(job["folder"]))
    logits = KeptLogits(Path(job["logits"]), plan.decoder.vocab_size)
    result = complete_share(plan, plan.tokenizer, folder, began, None, logits)
    return {"result": result.to_bytes().decode("ascii")}


if __name__ == "__main__":
    sys.exit(own_process.serve(answer))
