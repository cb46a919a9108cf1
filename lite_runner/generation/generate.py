"""Requests from their first token to their last, with hooks that hear of each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.generation.request import Completion, Event, Finished, Request, Token
from lite_runner.generation.result import Generation, GenerationTiming
from lite_runner.generation.scheduler import Scheduler
from lite_runner.system.signals import deferred

# (prompt index, return index, token id); a true answer ends the sequence.
OnToken = Callable[[int, int, int], "bool | None"]
# (prompt index, return index, logits [vocab], what the token was chosen by [vocab]).
OnLogits = Callable[[int, int, NDArray[np.float32], NDArray[np.floating[Any]]], None]
# Hears of each completion as soon as it is final.
OnFinish = Callable[[Completion], None]


def generate(
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    first_index: int = 0,
    on_token: OnToken | None = None,
    on_finish: OnFinish | None = None,
    on_logits: OnLogits | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> Generation:
    """The completions of `requests`, ordered by prompt and return index.

    Prompts are counted from `first_index`. `on_token(prompt, return, token)` sees every new token
    but eos, and ends the sequence by answering true (stop texts); beam search, where no token is
    sure until the end, never calls it. `on_finish(completion)` follows the last token of each.
    `on_logits` sees what each token is chosen by, that of eos too, and no beams either; it is for
    requests with keep_logits.
    KeyboardInterrupt ends the run with what there is. Where `interrupted` is given, which is asked
    before every step, only its true answer does, and KeyboardInterrupt is raised: ranks that share
    a model stop together or not at all.
    Raises ConfigError where a prompt does not fit, RunnerError where logits are not finite.
    """
    run = _Run(scheduler, first_index, on_token, on_finish, on_logits)
    began = time.perf_counter()
    timing, seconds = GenerationTiming(), dict[str | None, float]()
    scheduler.timing, scheduler.adapter_s = timing, seconds
    cut = False
    try:
        for request in requests:
            run.add(request)
        while not (run.over or cut):
            cut = interrupted is not None and interrupted()
            if not cut:
                run.told = scheduler.step()
                if timing.time_to_first_token_s is None and run.told:
                    timing.time_to_first_token_s = time.perf_counter() - began
                run.hear()
    except KeyboardInterrupt:
        if interrupted is not None:
            raise
        cut = True
    finally:
        run.end()
    return Generation(run.completions(), timing, cut, seconds)


class _Run:
    """What has come of the requests of one call."""

    def __init__(
        self,
        scheduler: Scheduler,
        first_index: int,
        on_token: OnToken | None,
        on_finish: OnFinish | None,
        on_logits: OnLogits | None,
    ) -> None:
        self._scheduler, self._first = scheduler, first_index
        self._on_token, self._on_finish, self._on_logits = on_token, on_finish, on_logits
        self._indices: dict[int, int] = {}  # of the scheduler's numbers
        self._open = 0  # sequences that go on
        self._done: dict[tuple[int, int], Completion] = {}
        self.told: list[Event] = []  # by the last step, and not heard yet

    @property
    def over(self) -> bool:
        return self._open == 0

    def add(self, request: Request) -> None:
        with deferred():
            id = self._scheduler.add(request)
            self._indices[id] = self._first + len(self._indices)
            self._open += request.options.num_return_sequences

    def hear(self) -> None:
        """Keep what is final, and then call the hooks, which may raise."""
        events = self.told
        with deferred():
            self._keep(events)
            self.told = []
        for event in events:
            index = self._indices[event.id]
            if isinstance(event, Finished):
                self._tell(self._done[index, event.completion.return_index])
                continue
            if self._on_logits and event.logits is not None and event.scores is not None:
                self._on_logits(index, event.index, event.logits, event.scores)
            if not event.is_end and self._completes(index, event):
                self._stop(event)

    def end(self) -> None:
        """Take what there is of those that go on."""
        with deferred():
            ended = [event for id in self._indices for event in self._scheduler.finish(id)]
            self._keep([*self.told, *ended])

    def completions(self) -> list[Completion]:
        return [self._done[key] for key in sorted(self._done)]

    def _keep(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                continue
            if event.error is not None:
                raise event.error
            index = self._indices[event.id]
            completion = replace(event.completion, prompt_index=index)
            self._done[index, completion.return_index] = completion
            self._open -= 1

    def _completes(self, index: int, event: Token) -> bool:
        return bool(self._on_token and self._on_token(index, event.index, event.token))

    def _stop(self, event: Token) -> None:
        """The text is complete with this token."""
        with deferred():
            ended = self._scheduler.finish(event.id, "stop", event.index)
            self._keep(ended)
        for one in ended:
            self._tell(self._done[self._indices[one.id], one.completion.return_index])
        if not ended:  # the token was its last one anyway
            key = self._indices[event.id], event.index
            self._done[key] = replace(self._done[key], finish_reason="stop")

    def _tell(self, completion: Completion) -> None:
        if self._on_finish:
            self._on_finish(completion)
