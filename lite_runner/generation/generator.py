"""What completes prompts: a backend under our scheduler, or an engine that generates by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lite_runner.backends.base import AdapterSlots, Backend
from lite_runner.generation.generate import OnFinish, OnLogits, OnToken, generate
from lite_runner.generation.request import Request
from lite_runner.generation.result import Generation
from lite_runner.generation.scheduler import Scheduler


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
        """The completions of `requests`: see `generate` in generate.py."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


class ScheduledGenerator:
    """A backend, whose logits our scheduler turns into tokens. See Generator."""

    def __init__(self, backend: Backend, *, prefix_cache: bool) -> None:
        self._backend, self._prefix_cache = backend, prefix_cache
        self.engine, self.adapters = backend.info.engine, backend.adapters

    @property
    def compile_s(self) -> float:
        return self._backend.compile_s

    def prepare(self) -> None:
        self._backend.prepare()

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
        return generate(
            Scheduler(self._backend, prefix_cache=self._prefix_cache),
            requests,
            first_index=first_index,
            on_token=on_token,
            on_finish=on_finish,
            on_logits=on_logits,
            interrupted=interrupted,
        )

    def close(self) -> None:
        self._backend.close()
