"""The plan of a server."""

from __future__ import annotations

from dataclasses import replace

from lite_runner.plan.plan import Plan
from lite_runner.plan.session import plan_session
from lite_runner.serving.options import ServeOptions
from lite_runner.system import environment


def plan_serving(config: ServeOptions) -> Plan:
    """Packages, files, adapters, backend and memory, all validated. Raises RunnerError."""
    environment.check_packages("serve")
    if config.serve.engine == "ray":
        environment.check_packages("ray")
    plan = plan_session(
        config,
        slots=config.serve.max_running,
        length=config.serve.max_length,
        key="serve.max_length",
        all_logits=not config.runs_given_model or config.takes_packed,
    )
    # OpenAI's default, whatever the model's; a request with temperature 0 is greedy.
    defaults = replace(plan.work.generation, do_sample=config.do_sample is not False)
    return replace(plan, job=replace(plan.work, generation=defaults))
