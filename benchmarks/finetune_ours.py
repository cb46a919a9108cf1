"""One process of ours for benchmarks/finetune.py; prints one line of JSON a step.

It is `run_lite.py run_mode=finetune`, with the time of the processor around each step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from lite_runner.app import console
from lite_runner.training.trainer import StepMetrics, Trainer

run = Trainer.run


def timed(self: Trainer) -> Generator[StepMetrics, None, None]:
    """The steps, each with a line."""
    began = time.process_time()
    for step in run(self):
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said: dict[str, Any] = {"processor": time.process_time() - began, "memory": memory}
        print(json.dumps(said | {"loss": step.loss, "seconds": step.seconds}), flush=True)
        yield step
        began = time.process_time()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    Trainer.run = timed  # type: ignore[method-assign]
    sys.argv[1:] = job["overrides"]
    console()


if __name__ == "__main__":
    main()
