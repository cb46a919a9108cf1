"""Token generation: scheduling, sampling and beam search over a Backend. NumPy only, no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner import profiler
from lite_runner.backends import Backend, Drafting, GivesHidden, PredictsNext, Storing
from lite_runner.config.generation import FinishReason
from lite_runner.generation.request import (
    Adjustments,
    Completion,
    Event,
    Finished,
    Generation,
    GenerationTiming,
    Guide,
    Logprobs,
    Request,
    Token,
    check_lengths,
    max_sequence_of,
    truncate_left,
)
from lite_runner.generation.sampling import logprobs_of, prompt_logprobs_of
from lite_runner.generation.scheduler import Scheduler, SchedulerOutput
from lite_runner.system.signals import deferred

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots
    from lite_runner.generation.draft_model import Drafts

__all__ = [
    "Adjustments",
    "Completion",
    "Engine",
    "Event",
    "Finished",
    "Generation",
    "GenerationTiming",
    "Generator",
    "Guide",
    "Logprobs",
    "OnFinish",
    "OnLogits",
    "OnToken",
    "Request",
    "Run",
    "Token",
    "check_lengths",
    "logprobs_of",
    "max_sequence_of",
    "prompt_logprobs_of",
    "truncate_left",
]

_NOTHING = np.zeros((0, 0), np.float32)
# (prompt index, return index, token id); a true result ends the sequence.
OnToken = Callable[[int, int, int], "bool | None"]
# (prompt index, return index, logits [vocab], processed scores [vocab]).
OnLogits = Callable[[int, int, NDArray[np.float32], NDArray[np.floating[Any]]], None]
# Called with each completion as soon as it is final.
OnFinish = Callable[[Completion], None]


class Generator(Protocol):
    """Completes requests. Its weights are loaded."""

    @property
    def engine(self) -> str:
        """Name of the engine in result.json."""
        ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """None: base model only."""
        ...

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far, in any call."""
        ...

    def prepare(self) -> None:
        """Compile ahead of the first token."""
        ...

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raises ConfigError if it does not fit."""
        ...

    def finish(
        self, id: int, reason: FinishReason = "interrupted", index: int | None = None
    ) -> list[Finished]:
        """End a request, or one of its sequences, now; nothing where it has ended."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        first_index: int = 0,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        on_logits: OnLogits | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Generation:
        """The completions of `requests`, ordered by prompt and return index.

        Prompts are numbered from `first_index`. `on_token(prompt, return, token)` is called for
        every new token but eos, and ends the sequence by returning true (stop strings); not for
        beam search, whose tokens are final only at the end. `on_finish(completion)` follows each
        last token. `on_logits` gets the logits of each token, eos included, for requests with
        keep_logits; not for beam search.
        KeyboardInterrupt ends the run with the partial completions. If `interrupted` is given, it
        is polled before every step and only its true result does so, while KeyboardInterrupt
        propagates: the ranks of a replica must stop together.
        Raises ConfigError if a prompt does not fit, RunnerError for non-finite logits.
        """
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


class Engine:
    """Runs requests over one backend; the only driver of a scheduler. See Generator.

    Requests can be added and finished between any two steps. Not thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        token_budget: int | None = None,
        *,
        prefix_cache: bool = True,
        step_s: float | None = None,
        speculate: bool = False,
    ) -> None:
        """Options as of Scheduler; `speculate`: draft by prompt lookup where nothing of
        the backend drafts. Raises ConfigError for a budget that does not fit."""
        self.backend = backend
        self._stored = backend.stored if isinstance(backend, Storing) else None
        draft = backend.draft if isinstance(backend, Drafting) else None
        layer = backend.next_token if isinstance(backend, PredictsNext) else None
        drafts: Drafts | None = None
        if draft is not None:
            from lite_runner.generation.draft_model import DraftModel

            drafts = DraftModel(draft, backend.info.vocab_size)
        elif layer is not None:
            from lite_runner.generation.draft_model import NextTokenDrafts

            drafts = NextTokenDrafts(layer)
        elif speculate:
            from lite_runner.generation.speculation import PromptLookups

            drafts = PromptLookups()
        self.scheduler = Scheduler(
            backend,
            token_budget,
            prefix_cache=prefix_cache,
            step_s=step_s,
            drafts=drafts,
            stored=self._stored,
        )

    @property
    def engine(self) -> str:
        return self.backend.info.engine

    @property
    def adapters(self) -> AdapterSlots | None:
        return self.backend.adapters

    @property
    def compile_s(self) -> float:
        return self.backend.compile_s

    @property
    def idle(self) -> bool:
        """True if there are no requests."""
        return self.scheduler.idle

    def prepare(self) -> None:
        self.backend.prepare()

    def close(self) -> None:
        self.backend.close()

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raises ConfigError as Scheduler.add."""
        return self.scheduler.add(request)

    def finish(
        self, id: int, reason: FinishReason = "interrupted", index: int | None = None
    ) -> list[Finished]:
        """End a request, or one of its sequences, now: see Scheduler.finish."""
        return self.scheduler.finish(id, reason, index)

    def step(self) -> list[Event]:
        """Schedule, execute, update; returns the events. After an exception of the backend, or
        Ctrl-C, the next call repeats the step: no event is lost or repeated."""
        began, compiled = time.perf_counter(), self.backend.compile_s

        def seconds() -> float:
            return time.perf_counter() - began - (self.backend.compile_s - compiled)

        step = self.scheduler.schedule()
        logits, hidden = self._execute(step)
        computed = time.perf_counter()
        if step.rows:
            self.scheduler.update(step, logits, seconds, hidden)
            if profiler.recorder is not None:
                ended, prompt = time.perf_counter(), sum(len(row.tokens) for row in step.of_prompts)
                new, rows = sum(len(row.tokens) for row in step.rows) - prompt, len(step.rows)
                profiler.recorder.step(began, computed, ended, rows, prompt, new)
        return self.scheduler.events()

    def _execute(self, step: SchedulerOutput) -> tuple[NDArray[np.float32], ...]:
        """Compute the rows: logits, and hidden states of the rows that ask for them."""
        rows = [row for row in step.rows if not row.hidden]
        pooled = [row for row in step.rows if row.hidden]
        logits = self.backend.forward(rows) if rows else _NOTHING
        if not pooled:
            return logits, _NOTHING
        assert isinstance(self.backend, GivesHidden)  # as its info says: see Scheduler.add
        return logits, self.backend.hidden(pooled)

    def run(
        self, requests: Iterable[Request] = (), interrupted: Callable[[], bool] | None = None
    ) -> Iterator[list[Event]]:
        """Yield the events of each step until no request is left, or `interrupted`, called before
        each step, returns true. Requests may be added in between."""
        for request in requests:
            self.add(request)
        while not self.idle and not (interrupted is not None and interrupted()):
            yield self.step()

    def generate(
        self,
        requests: Sequence[Request],
        *,
        first_index: int = 0,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        on_logits: OnLogits | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Generation:
        run = Run(self, first_index, on_token, on_finish, on_logits)
        began = time.perf_counter()
        timing, seconds = GenerationTiming(), dict[str | None, float]()
        self.scheduler.timing, self.scheduler.adapter_s = timing, seconds
        cut = False
        try:
            for request in requests:
                run.add(request)
            for events in self.run(interrupted=interrupted):
                run.events = events  # no callback before they are stored
                if timing.time_to_first_token_s is None and events:
                    timing.time_to_first_token_s = time.perf_counter() - began
                run.process()
            cut = not run.over
        except KeyboardInterrupt:
            if interrupted is not None:
                raise
            cut = True
        finally:
            run.end()
        return Generation(run.completions(), timing, cut, seconds)


class Run:
    """The requests of one call of generate, and their callbacks."""

    def __init__(
        self,
        generator: Generator,
        first_index: int,
        on_token: OnToken | None,
        on_finish: OnFinish | None,
        on_logits: OnLogits | None,
    ) -> None:
        self._generator, self._first = generator, first_index
        self._on_token, self._on_finish, self._on_logits = on_token, on_finish, on_logits
        self._indices: dict[int, int] = {}  # request id -> prompt index
        self._open = 0  # running sequences
        self._done: dict[tuple[int, int], Completion] = {}
        self._stopped: set[tuple[int, int]] = set()  # sequences that a stop string has ended
        self.events: list[Event] = []  # of the last step, not processed yet

    @property
    def over(self) -> bool:
        return self._open == 0

    def add(self, request: Request) -> None:
        with deferred():
            id = self._generator.add(request)
            self._indices[id] = self._first + len(self._indices)
            self._open += request.options.num_return_sequences

    def process(self) -> None:
        """Store final completions, then call the callbacks, which may raise."""
        events = self.events
        with deferred():
            self._keep(events)
            self.events = []
        for event in events:
            index = self._indices[event.id]
            if isinstance(event, Finished):
                self._notify(self._done[index, event.completion.return_index])
                continue
            if (event.id, event.index) in self._stopped:
                continue  # computed ahead, in the step of the stop string
            if self._on_logits and event.logits is not None and event.scores is not None:
                self._on_logits(index, event.index, event.logits, event.scores)
            if not event.is_end and self._completes(index, event):
                self._stop(event)

    def end(self) -> None:
        """Finish the running sequences with their partial completions."""
        with deferred():
            ended = [event for id in self._indices for event in self._generator.finish(id)]
            self._keep([*self.events, *ended])

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
        """End a sequence after this token (a stop string)."""
        with deferred():
            ended = self._generator.finish(event.id, "stop", event.index)
            self._keep(ended)
            # It may have ended already, by its last token or one computed ahead.
            key = self._indices[event.id], event.index
            self._done[key] = self._done[key].stopped(event.count)
            self._stopped.add((event.id, event.index))
        for one in ended:
            self._notify(self._done[self._indices[one.id], one.completion.return_index])

    def _notify(self, completion: Completion) -> None:
        if self._on_finish:
            self._on_finish(completion)
