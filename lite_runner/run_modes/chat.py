"""run_mode=chat: a conversation in the terminal."""

from __future__ import annotations

import json
from contextlib import closing

from lite_runner.chat.conversation import ChatModel, Conversation
from lite_runner.chat.local import LocalModel
from lite_runner.chat.local import plan_chat as plan
from lite_runner.chat.options import ChatOptions
from lite_runner.chat.options import chat_faults as faults
from lite_runner.chat.remote import RemoteModel
from lite_runner.chat.terminal import SETTABLE, converse
from lite_runner.config.secret import read_key
from lite_runner.model.adapters import only_adapter
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ChatOptions):
    """run_mode=chat"""


def run(plan: Plan, folder: RunFolder) -> None:
    """Talk until the user ends it; the messages are written to the run folder. Raises
    RunnerError."""
    config = plan.config
    assert isinstance(config, Config)
    with closing(_model(plan, config)) as model:
        conversation = Conversation(model, config.system)
        if config.server:  # its defaults are not the run's
            given = {name: getattr(config, name) for name in SETTABLE}
            conversation.options = {n: value for n, value in given.items() if value is not None}
        if isinstance(config.adapter_id, str):
            conversation.choose(config.adapter_id)
        elif not config.server and (only := only_adapter(config)) is not None:
            conversation.choose(only)
        try:
            converse(conversation)
        finally:
            said = {"messages": conversation.messages()}
            folder.write_text("conversation.json", json.dumps(said, ensure_ascii=False, indent=1))


def _model(plan: Plan, config: Config) -> ChatModel:
    if not config.server:
        return LocalModel(plan)
    return RemoteModel(config.server, read_key("server_key", config.server_key))
