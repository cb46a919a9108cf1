"""run_mode=chat: a conversation in the terminal."""

from __future__ import annotations

import json
from contextlib import closing

from lite_runner.chat.conversation import Conversation
from lite_runner.chat.local import LocalModel
from lite_runner.chat.model import ChatModel
from lite_runner.chat.options import ChatOptions
from lite_runner.chat.options import chat_faults as faults
from lite_runner.chat.planning import plan_chat as plan
from lite_runner.chat.remote import RemoteModel
from lite_runner.chat.terminal import converse
from lite_runner.config.api_key import read_key
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
        if isinstance(config.adapter_id, str):
            conversation.choose(config.adapter_id)
        try:
            converse(conversation)
        finally:
            said = {"messages": conversation.messages()}
            folder.write_text("conversation.json", json.dumps(said, ensure_ascii=False, indent=1))


def _model(plan: Plan, config: Config) -> ChatModel:
    if not config.server:
        return LocalModel(plan)
    return RemoteModel(config.server, read_key("server_key", config.server_key))
