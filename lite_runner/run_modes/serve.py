"""run_mode=serve: an HTTP server of OpenAI's protocol."""

from __future__ import annotations

import os

from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.serving.options import ServeOptions as Config
from lite_runner.serving.options import serve_errors as errors
from lite_runner.serving.planning import plan_serving as plan

__all__ = ["Config", "errors", "plan", "run"]


def run(plan: Plan, _: RunFolder) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises RunnerError, EnvironmentFault where a package of the
    server is missing or the port is taken."""
    config = plan.config
    assert isinstance(config, Config)
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
