"""The plan of a conversation."""

from __future__ import annotations

from lite_runner.chat.options import ChatOptions
from lite_runner.plan.plan import Plan
from lite_runner.plan.session import plan_session
from lite_runner.system import environment


def plan_chat(config: ChatOptions) -> Plan:
    """Packages; and unless a server has it, the model. Raises RunnerError."""
    environment.check_packages("chat")
    if config.server:
        return Plan(config=config, lines={"server": config.server})
    return plan_session(config, slots=1, length=config.max_length, key="max_length")
