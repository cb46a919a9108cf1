"""What the endpoints share: the engine, the model's names, limits and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import field, replace
from typing import Any, TypeVar

import numpy as np

from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prefixes import with_ending
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.generation import Adjustments
from lite_runner.generation import Request as GenerationRequest
from lite_runner.records import dataclass
from lite_runner.serving.engine import Engine, Output
from lite_runner.serving.errors import ApiError
from lite_runner.serving.grammars import Grammar, Grammars
from lite_runner.serving.metrics import Metrics
from lite_runner.serving.options import Serve
from lite_runner.text.tokenizer import Tokenizer

T = TypeVar("T")
# Opens (name, folder); what it gives registers the adapter, in the engine's thread.
OpenAdapter = Callable[[str, str], Callable[[], None]]
_ASIDE = 2  # texts and grammars that are prepared at a time: more would take the engine's cores


@dataclass
class Usage:
    """Tokens of one call."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(eq=False)
class Server:
    """One model and its adapters."""

    engine: Engine
    tokenizer: Tokenizer
    name: str  # of the base model
    adapters: tuple[str, ...]  # as they are now
    defaults: GenerationConfig
    settings: Serve
    key: bytes | None
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    open_adapter: OpenAdapter | None = None  # None: adapters stay as they are
    adapter_uses: Counter[str] = field(default_factory=Counter)  # requests that are not over
    changing_adapters: set[str] = field(default_factory=set)  # names that come or go now
    _aside: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_ASIDE))

    def __post_init__(self) -> None:
        info, ends = self.engine.info, self.defaults.eos_token_id
        self._grammars = Grammars(self.tokenizer, info.vocab_size, ends)

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request means with `model`; None: the base model. Raises ApiError."""
        if name is None or name == self.name:
            return None
        if name not in self.adapters:
            known = ", ".join((self.name, *self.adapters))
            raise ApiError(
                404, f"model: no model {name!r}; there are: {known}", "model", "model_not_found"
            )
        return name

    async def encode(self, encode: Callable[[], list[int]]) -> list[int]:
        """The token ids that `encode` gives, computed in another thread."""
        return with_ending(self.engine.info.prefix, await self.aside(encode))

    async def encode_chat(
        self, messages: list[dict[str, Any]], generates: bool, tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """The token ids of messages as chat templates take them. Raises ApiError for messages that
        the template does not take."""
        try:
            return await self.encode(lambda: self.tokenizer.encode_chat(messages, generates, tools))
        except (ArtifactError, ConfigError) as error:
            raise ApiError(400, f"messages: {error.message}", "messages") from None

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in another thread."""
        async with self._aside:
            return await asyncio.to_thread(work)

    async def restricted(
        self, adjustments: Adjustments | None, grammar: Grammar | None
    ) -> Adjustments | None:
        """`adjustments` with a grammar, compiled in another thread. Raises ApiError."""
        if grammar is None:
            return adjustments
        guide = await self.aside(lambda: self._grammars.compile(grammar))
        return replace(adjustments or Adjustments(), guide=guide)

    @asynccontextmanager
    async def answer(
        self,
        prompts: Sequence[tuple[Sequence[int], GenerationConfig]],
        adapter: str | None,
        adjustments: Adjustments | None,
        priority: int = 0,
        *,
        special_tokens: bool = False,
    ) -> AsyncIterator[AsyncIterator[tuple[int, Output]]]:
        """(prompt's place, output) of each prompt with its options, as they come. What still runs
        at the end is cancelled. Raises Busy, Stopped, and TimeoutError out of the iterator."""
        outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        deadline = asyncio.get_running_loop().time() + self.settings.request_timeout
        handles = []

        async def each() -> AsyncIterator[tuple[int, Output]]:
            while True:
                left = deadline - asyncio.get_running_loop().time()
                try:
                    yield await asyncio.wait_for(outputs.get(), left)
                except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
                    raise TimeoutError from None

        if adapter is not None:
            self.adapter_of(adapter)  # it may have gone since the request came
            self.adapter_uses[adapter] += 1
        try:
            for place, (tokens, options) in enumerate(prompts):
                request = GenerationRequest(
                    np.array(tokens, np.int32),
                    options,
                    adapter,
                    (options.seed, place),
                    priority,
                    name="prompt",
                    adjustments=adjustments,
                )

                def put(output: Output, place: int = place) -> None:
                    outputs.put_nowait((place, output))

                handle = self.engine.submit(request, put, special_tokens=special_tokens)
                handles.append(handle)
            yield each()
        finally:
            for handle in handles:
                self.engine.cancel(handle)
            if adapter is not None:
                self.adapter_uses[adapter] -= 1


class Gone(Exception):
    """The client has left."""


async def or_gone(work: Awaitable[T], left: Awaitable[None]) -> T:
    """The result of `work`. Raises Gone where the client has `left` before, and cancels it."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
