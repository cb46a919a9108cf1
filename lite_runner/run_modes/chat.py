"""run_mode=chat: a conversation in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from lite_runner.chat.conversation import Answer, ChatModel, ContextFull, Conversation, Messages
from lite_runner.chat.remote import RemoteModel
from lite_runner.chat.terminal import SETTABLE, converse
from lite_runner.config import Invalid, invalid, show
from lite_runner.config.checks import session_errors
from lite_runner.config.prompt import Request as Options
from lite_runner.config.prompt import with_ending
from lite_runner.config.schema import SessionOptions
from lite_runner.errors import ConfigError
from lite_runner.generation import Engine, Request
from lite_runner.model.adapters import only_adapter
from lite_runner.output import RunFolder
from lite_runner.plan import Plan
from lite_runner.plan.resources import open_planned
from lite_runner.records import dataclass
from lite_runner.run_modes._plan import plan_session
from lite_runner.system import environment
from lite_runner.system.secret import read_key
from lite_runner.text.spelling import StopChecker

_OF_TEXTS = ("num_beams", "length_penalty", "num_return_sequences", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class Config(SessionOptions):
    """run_mode=chat"""

    system: str  # "": none
    server: str  # URL of a server; "": the model is loaded here
    server_key: str  # env:NAME or a file; "": none


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a conversation."""
    for key in _OF_TEXTS:
        if (value := getattr(config, key)) is not None:
            yield invalid(key, f"{key}={show(value)} has no effect with run_mode=chat")
    if isinstance(config.adapter_id, tuple):
        yield invalid("adapter_id", f"adapter_id: got {show(config.adapter_id)}, expected one name")
    if config.server:
        parts = urlsplit(config.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield invalid("server", f"server: got {show(config.server)}, expected http://HOST:PORT")
        return
    if config.server_key:
        yield invalid(("server_key", "server"), "server_key needs server=http://HOST:PORT")
    yield from session_errors(config)


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
        elif not config.server and (only := only_adapter(config.adapters)) is not None:
            conversation.choose(only)
        try:
            converse(conversation)
        finally:
            text = json.dumps({"messages": conversation.messages()}, ensure_ascii=False, indent=1)
            folder.write_text("conversation.json", text)


def _model(plan: Plan, config: Config) -> ChatModel:
    if not config.server:
        return _LocalModel(plan)
    return RemoteModel(config.server, read_key("server_key", config.server_key))


class _LocalModel:
    """The model of a plan. A turn goes on from the keys of the one before. See ChatModel."""

    def __init__(self, plan: Plan) -> None:
        """Loads the weights. Raises RunnerError."""
        config = plan.config
        assert isinstance(config, SessionOptions) and plan.tokenizer is not None
        if not plan.tokenizer.has_chat_template:
            raise ConfigError(
                f"{plan.tokenizer.source} has no chat template",
                "use a model tuned for chat (often named -Instruct), or run_mode=predict",
            )
        self._backend = open_planned(plan)
        self._backend.prepare()
        self._tokenizer, self._defaults = plan.tokenizer, plan.work.generation
        self._engine = Engine(self._backend, speculate=config.looks_up)
        self._turn = 0
        self.name = config.model_name
        given = plan.work.adapters
        self.adapters = tuple(one.name for one in given.adapters) if given else ()

    def answer(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        adapter: str | None,
        on_text: Callable[[str], None],
    ) -> Answer:
        info, tokenizer = self._backend.info, self._tokenizer
        ids = tokenizer.encode_chat([dict(message) for message in messages])
        ids = with_ending(info.prefix, ids)
        chosen = Options(prompt=" ", **options).options(self._defaults)
        room = info.max_length - len(ids)
        if room < 1:
            raise ContextFull
        limit = room if chosen.max_new_tokens is None else min(room, chosen.max_new_tokens)
        chosen = replace(chosen, max_new_tokens=limit, min_new_tokens=0)
        seed = chosen.seed if "seed" in options else chosen.seed + self._turn
        self._turn += 1
        checker = StopChecker(tokenizer, chosen.stop)
        began, first = time.perf_counter(), 0.0

        def on_token(_: int, __: int, token: int) -> bool:
            nonlocal first
            first = first or time.perf_counter() - began
            on_text(checker.put(token))
            return checker.stopped

        request = Request(np.array(ids, np.int32), chosen, adapter, (seed, 0), name="the message")
        outcome = self._engine.generate([request], on_token=on_token)
        on_text(checker.finish())
        (completion,) = outcome.completions
        return Answer(
            checker.text,
            completion.finish_reason,
            len(ids),
            completion.cached_tokens,
            len(completion.drawn),
            first,
            time.perf_counter() - began,
        )

    def close(self) -> None:
        self._backend.close()
