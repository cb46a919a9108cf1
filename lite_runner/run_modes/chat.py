"""run_mode=chat: a conversation in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

from lite_runner.chat.conversation import ChatModel, Conversation
from lite_runner.chat.local import LocalModel
from lite_runner.chat.remote import RemoteModel
from lite_runner.chat.terminal import SETTABLE, converse
from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.generate_checks import session_faults
from lite_runner.config.schema import SessionOptions
from lite_runner.config.secret import read_key
from lite_runner.model.adapters import only_adapter
from lite_runner.output.report import RunFolder
from lite_runner.plan.generating import plan_session
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass
from lite_runner.system import environment

_OF_TEXTS = ("num_beams", "length_penalty", "num_return_sequences", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class Config(SessionOptions):
    """run_mode=chat"""

    system: str  # "": none
    server: str  # URL of a server; "": the model is loaded here
    server_key: str  # env:NAME or a file; "": none


def faults(config: Config) -> Iterator[Fault]:
    """Validation errors of a conversation."""
    for key in _OF_TEXTS:
        if (value := getattr(config, key)) is not None:
            yield fault(key, f"{key}={show(value)} has no effect with run_mode=chat")
    if isinstance(config.adapter_id, tuple):
        yield fault("adapter_id", f"adapter_id: got {show(config.adapter_id)}, expected one name")
    if config.server:
        parts = urlsplit(config.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield fault("server", f"server: got {show(config.server)}, expected http://HOST:PORT")
        return
    if config.server_key:
        yield fault(("server_key", "server"), "server_key needs server=http://HOST:PORT")
    yield from session_faults(config)


def plan(config: Config) -> Plan:
    """Packages; and unless a server has it, the model. Raises RunnerError."""
    environment.check_packages("chat")
    read_key("server_key", config.server_key)
    if config.server:
        return Plan(config=config, lines={"server": config.server})
    return plan_session(config, slots=[1], length=config.max_length or "auto")


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
