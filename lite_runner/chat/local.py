"""The model of this process in a conversation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lite_runner.chat.conversation import Answer, ContextFull, Messages
from lite_runner.config.prompt import Request as Options
from lite_runner.config.prompt import with_ending
from lite_runner.config.schema import SessionOptions
from lite_runner.errors import ConfigError
from lite_runner.generation import Engine, Request
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import open_planned
from lite_runner.text.streaming import Transcript


class LocalModel:
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
        self._engine = Engine(self._backend, speculate=config.speculate == "ngram")
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
        transcript = Transcript(tokenizer, chosen.stop)
        began, first = time.perf_counter(), 0.0

        def on_token(_: int, __: int, token: int) -> bool:
            nonlocal first
            first = first or time.perf_counter() - began
            on_text(transcript.put(token))
            return transcript.stopped

        request = Request(np.array(ids, np.int32), chosen, adapter, (seed, 0), name="the message")
        outcome = self._engine.generate([request], on_token=on_token)
        on_text(transcript.finish())
        (made,) = outcome.completions
        return Answer(
            transcript.text,
            made.finish_reason,
            len(ids),
            made.cached_tokens,
            len(made.drawn),
            first,
            time.perf_counter() - began,
        )

    def close(self) -> None:
        self._backend.close()
