"""run_mode=serve: an HTTP server of OpenAI's protocol."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.serving.options import ServeOptions as Config
from lite_runner.serving.options import serve_errors as errors
from lite_runner.serving.planning import plan_serving
from lite_runner.system import environment

__all__ = ["Config", "errors", "plan", "run"]


def plan(config: Config) -> Plan:
    """See `plan_serving`; a batch is read before anything is fetched."""
    if not config.serve.batch:
        return plan_serving(config)
    environment.check_packages("serve")
    from lite_runner.serving.batches import read_batch

    writes = f"{config.serve.batch_target}, {read_batch(config.serve):,} answers"
    plan = plan_serving(config)
    return replace(plan, lines={**plan.lines, "writes": writes})


def run(plan: Plan, folder: RunFolder) -> None:
    """Serve until SIGTERM or Ctrl-C, or answer a batch. Raises RunnerError, EnvironmentFault where
    a package of the server is missing or the port is taken."""
    config = plan.config
    assert isinstance(config, Config)
    if config.serve.batch:
        from lite_runner.serving.batches import run_batch

        began = time.perf_counter()
        engine = run_batch(plan)
        folder.write_result(Result.of_files(plan, plan.model.source, began, engine=engine))
        return
    # Imports the packages of the extras `serve` and `ray`.
    if config.serve.engine == "ray":
        # Read when Ray is imported: it reports its use elsewhere, and shows similar lines once.
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS"):
            os.environ.setdefault(name, "0")
        from lite_runner.serving.cluster import serve_on_ray

        serve_on_ray(plan)
    else:
        from lite_runner.serving.server import serve

        serve(plan)
