"""run_mode=serve: an HTTP server of OpenAI's protocol."""

from __future__ import annotations

from dataclasses import dataclass

from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.serving.options import ServeOptions
from lite_runner.serving.options import serve_faults as faults
from lite_runner.serving.planning import plan_serving as plan

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ServeOptions):
    """run_mode=serve"""


def run(plan: Plan, _: RunFolder) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises RunnerError, EnvironmentFault where a package of the
    server is missing or the port is taken."""
    from lite_runner.serving.server import serve  # imports the packages of the extra `serve`

    serve(plan)
