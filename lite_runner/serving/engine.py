"""An engine in a thread of its own: requests in, pieces of text out.

Other threads submit and cancel requests at any time; the thread handles them between two steps, so
that a cancelled request frees its cache slots within a step. What a step gave is handed over in one
call, for each wakes the event loop.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from lite_runner.backends import Backend
from lite_runner.config.generation import FinishReason
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.generation import Completion, Engine, Finished, Logprobs, Request, Token
from lite_runner.text.spelling import StopChecker
from lite_runner.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
STEP_S = 0.1  # of a step to aim at: a long prompt must not hold up the streams of others


class Busy(Exception):
    """The queue is full."""


class Stopped(Exception):
    """No requests are accepted: the engine is closing, or its backend has failed."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request fits the model, and waits or runs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A new token of a sequence, and the text that became final."""

    index: int  # of the sequence in the request
    text: str
    token: int
    logprobs: Logprobs | None  # of this token
    prompt_logprobs: Logprobs | None = None  # with the first token, where they are asked for


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has finished; `text` was held back until then."""

    index: int
    text: str
    finish_reason: FinishReason
    completion: Completion
    stop_string: str | None = None  # that ended it


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed."""

    error: RunnerError | Stopped


Output = Accepted | Piece | Ended | Failed
Put = Callable[[Output], None]


@dataclass(eq=False)
class Handle:
    """A submitted request."""

    request: Request
    put: Put
    checkers: Sequence[StopChecker]
    open: int  # sequences that are not over
    lengths: dict[int, int] = field(default_factory=dict)  # of sequences that a stop string ended
    id: int | None = None  # of the scheduler, once it has the request


@dataclass(frozen=True)
class Load:
    """Load of the engine: running and waiting sequences, cache use."""

    running: int  # sequences in cache slots
    waiting: int
    cache_usage: float  # share of the KV cache that is in use
    preemptions: int  # sequences so far that made room for others
    adapters: tuple[set[str], set[str]]  # of running sequences, and of waiting ones


class EngineThread:
    """Runs requests until it is closed. Its methods may be called from any thread."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        token_budget: int | None,
        prefix_cache: bool,
        speculate: bool = False,
        max_queue: int,
        post: Callable[[Sequence[tuple[Put, Output]]], None],
    ) -> None:
        """`post` is called from the engine's thread with the outputs of a step, to be put where
        they belong. Raises ConfigError for a budget that does not fit the backend."""
        self.info, self.adapters = backend.info, backend.adapters
        self._tokenizer, self._post = tokenizer, post
        self._engine = Engine(
            backend, token_budget, prefix_cache=prefix_cache, step_s=STEP_S, speculate=speculate
        )
        self.most = backend.info.slots + max_queue  # sequences that run or wait
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._inbox: deque[tuple[Handle, bool]] = deque()  # True: submitted, False: cancelled
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._sequences = 0  # submitted and not over
        self._closing = False
        self._failure: BaseException | None = None
        # The thread's own:
        self._handles: dict[int, Handle] = {}
        self._outputs: list[tuple[Put, Output]] = []
        # Of the last step.
        self._running: tuple[int, float, int, tuple[set[str], set[str]]]
        self._running = 0, 0.0, 0, (set(), set())
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine; None: it runs."""
        return self._failure

    @property
    def load(self) -> Load:
        """The load as of the last step."""
        running, usage, preemptions, adapters = self._running
        waiting = max(0, self._sequences - running)
        return Load(running, waiting, usage, preemptions, adapters)

    @property
    def idle(self) -> bool:
        return self._sequences == 0

    def submit(self, request: Request, put: Put, *, special_tokens: bool = False) -> Handle:
        """Queue a request; `put` gets Accepted or Failed first; `special_tokens`: they are text,
        too. Raises Busy, Stopped."""
        stop, width = request.options.stop, request.options.num_return_sequences
        checkers = [
            StopChecker(self._tokenizer, stop, skip_special_tokens=not special_tokens)
            for _ in range(width)
        ]
        handle = Handle(request, put, checkers, width)
        with self._changed:
            self._check_open()
            if self._sequences and self._sequences + width > self.most:
                raise Busy
            self._sequences += width
            self._inbox.append((handle, True))
            self._changed.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Cancel a request; no more outputs. No effect on a finished one."""
        with self._changed:
            self._inbox.append((handle, False))
            self._changed.notify()

    def between_steps(self, work: Callable[[], None]) -> Future[None]:
        """Have the thread do something, such as to `adapters`. Raises Stopped."""
        future: Future[None] = Future()
        with self._changed:
            self._check_open()
            self._calls.append((work, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread; requests that still run get Failed."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _check_open(self) -> None:
        if self._closing or self._failure is not None:
            raise Stopped("the server is shutting down" if self._closing else "out of order")

    def _run(self) -> None:
        try:
            while self._wait():
                self._take()
                self._step()
                self._flush()
        except BaseException as error:
            logger.exception("the engine has failed; requests get 503 from now on")
            self._failure = error
        finally:
            self._abandon()

    def _wait(self) -> bool:
        """Wait for work; False: to be closed."""
        with self._changed:
            while not (self._closing or self._inbox or self._calls or not self._engine.idle):
                self._changed.wait()
            return not self._closing

    def _take(self) -> None:
        """Hand submitted and cancelled requests to the engine."""
        with self._changed:
            taken, calls = list(self._inbox), list(self._calls)
            self._inbox.clear()
            self._calls.clear()
        for work, future in calls:
            try:
                work()
            except RunnerError as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        for handle, submitted in taken:
            if not submitted:
                self._forget(handle)
                continue
            try:
                handle.id = self._engine.add(handle.request)
            except RunnerError as error:
                self._fail(handle, error)
                continue
            self._handles[handle.id] = handle
            self._outputs.append((handle.put, Accepted()))

    def _step(self) -> None:
        try:
            events = deque(self._engine.step())
        except MemoryError:
            # The running requests exceed the memory. The engine would repeat the step.
            logger.exception("out of memory: running requests are ended")
            error = EnvironmentFault("out of memory", "fewer or shorter requests at a time")
            for running in list(self._handles.values()):
                self._fail(running, error)
            return
        while events:
            event = events.popleft()
            handle = self._handles.get(event.id)
            if handle is None:
                continue
            if isinstance(event, Finished):
                self._finished(handle, event)
            elif not event.is_end and event.index not in handle.lengths:
                events.extend(self._token(handle, event))

    def _token(self, handle: Handle, event: Token) -> Iterable[Finished]:
        """Put a token's text; the end of its sequence, if it completes a stop string."""
        checker = handle.checkers[event.index]
        text = checker.put(event.token)
        piece = Piece(event.index, text, event.token, event.logprobs, event.prompt_logprobs)
        self._outputs.append((handle.put, piece))
        if not checker.stopped:
            return ()
        handle.lengths[event.index] = event.count
        return self._engine.finish(event.id, "stop", event.index)

    def _finished(self, handle: Handle, event: Finished) -> None:
        if event.error is not None:
            self._fail(handle, event.error)
            return
        completion = event.completion
        checker = handle.checkers[completion.return_index]
        # It may have ended already: by its last token, or one computed ahead.
        if (length := handle.lengths.get(completion.return_index)) is not None:
            completion = completion.stopped(length)
        rest = checker.finish()  # a stop string may be in it
        ended = Ended(
            completion.return_index, rest, completion.finish_reason, completion, checker.stop_string
        )
        self._outputs.append((handle.put, ended))
        self._close_sequences(handle, 1)

    def _fail(self, handle: Handle, error: RunnerError | Stopped) -> None:
        self._outputs.append((handle.put, Failed(error)))
        self._forget(handle)

    def _forget(self, handle: Handle) -> None:
        if handle.id is not None and self._handles.get(handle.id) is handle:
            self._engine.finish(handle.id)
        self._close_sequences(handle, handle.open)

    def _close_sequences(self, handle: Handle, count: int) -> None:
        handle.open -= count
        if handle.open == 0 and handle.id is not None:
            self._handles.pop(handle.id, None)
        with self._changed:
            self._sequences -= count

    def _flush(self) -> None:
        scheduler = self._engine.scheduler
        preemptions = scheduler.timing.preemptions
        self._running = scheduler.running, scheduler.cache_usage, preemptions, scheduler.adapters
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._post(outputs)

    def _abandon(self) -> None:
        """Fail the remaining requests."""
        with self._changed:
            self._closing = True
            waiting = [handle for handle, submitted in self._inbox if submitted]
            self._inbox.clear()
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            future.set_exception(Stopped("the server is shutting down"))
        for handle in [*self._handles.values(), *waiting]:
            if handle.open:
                self._outputs.append((handle.put, Failed(Stopped("the server is shutting down"))))
        self._flush()
