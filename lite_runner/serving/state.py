"""State of the server: the engine, the model's names, limits and metrics."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic_core import from_json, to_json

from lite_runner import progress
from lite_runner.config.generation import GenerationConfig, Pooling
from lite_runner.config.prompt import with_ending
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.generation import Adjustments
from lite_runner.generation import Request as GenerationRequest
from lite_runner.model.embedding import EmbeddingConfig
from lite_runner.records import dataclass
from lite_runner.serving.engine import EngineThread, Output
from lite_runner.serving.errors import ApiError, client_message, shortened
from lite_runner.serving.metrics import Metrics
from lite_runner.serving.middleware import read_body
from lite_runner.serving.options import Serve
from lite_runner.serving.schemas import Message
from lite_runner.serving.tool_formats import FORMATS, detect_format
from lite_runner.serving.tools import plain_messages
from lite_runner.structured.grammars import Grammar, Grammars
from lite_runner.system.files import atomic_write
from lite_runner.system.memory import check_memory, free_memory, resident, return_freed
from lite_runner.system.secret import named_keys
from lite_runner.text.tokenizer import Tokenizer, TooManyTokens

T = TypeVar("T")
# Opens (name, folder); what it gives registers the adapter, in the engine's thread.
OpenAdapter = Callable[[str, str], Callable[[], None]]
_SHORT = 16 << 10  # bytes of a body that is read in less time than another thread takes
_LARGE = 1 << 20  # bytes of one whose memory malloc would keep
_ASIDE = 2  # texts and grammars that are prepared at a time: more would take the engine's cores
_MOST_STORED = 1000  # responses that are kept, the newest
_MOST_BYTES = 64 << 20  # of these together


@dataclass(frozen=True)
class Stored:
    """A stored response, which may be fetched and continued."""

    response: bytes  # JSON
    items: bytes  # JSON of its input, with that of those before
    owner: str | None = None  # name of the key that made it; no other one sees it


@dataclass(eq=False)
class Responses:
    """The newest responses, as many as the bounds allow."""

    _stored: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def add(self, id: str, one: Stored) -> None:
        """Store a response, dropping the oldest ones."""
        self._stored[id] = one
        self._bytes += _size(one)
        while self._bytes > _MOST_BYTES or len(self._stored) > _MOST_STORED:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= _size(oldest)

    def get(
        self, id: str, owner: str | None, status: int = 404, param: str | None = None
    ) -> Stored:
        """Raises ApiError with this status for one that is unknown, removed, too old, or another
        owner's."""
        if (one := self._stored.get(id)) is None or one.owner != owner:
            why = f"no response {shortened(id, 100)!r}: unknown, or no longer stored"
            message = f"{param}: {why}" if param else why
            raise ApiError(status, message, param, "response_not_found")
        self._stored.move_to_end(id)
        return one

    def remove(self, id: str, owner: str | None) -> None:
        """Raises ApiError as `get`."""
        self._bytes -= _size(self.get(id, owner))
        del self._stored[id]

    def save(self, path: Path) -> None:
        """Write all to a file: a line of ids and owners, then two lines of each."""
        with atomic_write(path, self._bytes) as file:  # it may be killed meanwhile
            file.write(to_json([(id, one.owner) for id, one in self._stored.items()]) + b"\n")
            for one in self._stored.values():
                file.writelines((one.response, b"\n", one.items, b"\n"))

    def load(self, path: Path) -> None:
        """Take those of a file, if it is there."""
        if not path.exists():
            return
        with path.open("rb") as file:
            heads = from_json(file.readline())
            for (id, owner), response, items in zip(heads, file, file, strict=True):
                self.add(id, Stored(response.rstrip(b"\n"), items.rstrip(b"\n"), owner))


def is_stored(path: Path, id: str) -> bool:
    """True if a file of responses has this one."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return any(one == id for one, _ in from_json(file.readline()))


def _size(one: Stored) -> int:
    return len(one.response) + len(one.items)


@dataclass(eq=False)
class Server:
    """One model and its adapters."""

    engine: EngineThread
    tokenizer: Tokenizer
    names: tuple[str, ...]  # of the base model; the first is shown
    adapters: tuple[str, ...]  # as they are now
    defaults: GenerationConfig
    settings: Serve
    key: bytes | None
    metrics: Metrics
    need: int = 0  # bytes that this process takes for the model, at most
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    open_adapter: OpenAdapter | None = None  # None: adapters stay as they are
    embedding: EmbeddingConfig = EmbeddingConfig()  # as the checkpoint says
    adapter_uses: Counter[str] = field(default_factory=Counter)  # requests that are not over
    responses: Responses = field(default_factory=lambda: Responses())
    changing_adapters: set[str] = field(default_factory=set)  # names that come or go now
    _log_fails: bool = False
    _bodies: dict[int, bytearray] = field(default_factory=dict)  # by id: as far as they have come
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _aside: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_ASIDE))

    def __post_init__(self) -> None:
        info, ends = self.engine.info, self.defaults.eos_token_id
        self.keys = named_keys(self.key)
        self._grammars = Grammars(self.tokenizer, info.vocab_size, ends)
        given = self.settings.tool_parser
        self.call_format = detect_format(self.tokenizer) if given == "auto" else FORMATS[given]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def stores(self) -> bool:
        """True if responses are stored; not with replicas, since the next request may reach another
        one."""
        return self.settings.engine == "local"

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request means with `model`; None: the base model. Raises ApiError."""
        if name is None or name in self.names:
            return None
        if name not in self.adapters:
            known = ", ".join((*self.names, *self.adapters))
            raise ApiError(
                404,
                f"model: no model {shortened(name, 100)!r}; available: {known}",
                "model",
                "model_not_found",
            )
        return name

    def priority_of(self, given: int | None) -> int:
        """The priority that a request asks for. Raises ApiError where it may not."""
        if given and not self.settings.priority:
            raise ApiError(
                400,
                "priority: requests are taken in their order here (serve.priority=false)",
                "priority",
                "unsupported_parameter",
            )
        return given or 0

    async def encode(self, text: str, special: bool, field: str = "prompt") -> list[int]:
        """The token ids of a prompt. Raises ApiError if it is far too long."""
        most = self.engine.info.max_length
        return await self._encoded(field, lambda: self.tokenizer.encode(text, special, most))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        generates: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        """The token ids of a chat. Raises ApiError for messages that the template does not take,
        and those that are far too long."""
        most = self.engine.info.max_length

        def encode() -> list[int]:
            plain = plain_messages(messages, self.tokenizer, self.call_format)
            return self.tokenizer.encode_chat(plain, generates, tools, most, template_kwargs)

        try:
            return await self._encoded("messages", encode)
        except (ArtifactError, ConfigError) as error:
            raise ApiError(400, f"messages: {client_message(error)}", "messages") from None

    async def _encoded(self, field: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return with_ending(self.engine.info.prefix, await self.aside(encode))
        except TooManyTokens as error:
            raise ApiError(
                400, f"{field}: {error.message}", field, "context_length_exceeded"
            ) from None

    async def log_request(self, id: str, path: str, body: Callable[[], Any]) -> None:
        """Append a request to serve.request_log, as a line of a batch."""
        log = Path(self.settings.request_log).expanduser()

        def write() -> None:
            try:
                one = {"custom_id": f"{id}-{secrets.token_hex(4)}", "method": "POST"}
                line = to_json({**one, "url": path, "body": body()})
            except ValueError:  # no JSON: there is nothing to replay
                return
            # Opened each time: it may have been moved, or be another process's, too.
            file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(file, "ab", buffering=0) as opened:
                opened.write(line + b"\n")

        try:
            await self.aside(write)
            self._log_fails = False
        except OSError as error:
            if not self._log_fails:  # once
                progress.note(f"serve.request_log={log}: {error.strerror}; requests go on")
            self._log_fails = True

    async def read(self, parts: AsyncIterable[bytes], work: Callable[[bytearray], T]) -> T:
        """The result of `work` on a body: in another thread, one at a time, unless it is short.
        Raises ApiError, MemoryError."""
        data = bytearray()
        self._bodies[id(data)] = data
        try:
            await read_body(parts, data, self.memory_left)
            if len(data) <= _SHORT:
                return work(data)
            async with self._reading:
                check_memory(len(data), self.memory_left())
                return await asyncio.to_thread(work, data)
        finally:
            del self._bodies[id(data)]
            if len(data) > _LARGE:
                with suppress(BufferError):  # of a caller that left, a thread may still read it
                    data.clear()
                await asyncio.to_thread(return_freed)

    def memory_left(self) -> int:
        """Free memory, less the reserve for the model's cache and steps."""
        taken = resident() - sum(map(len, self._bodies.values()))
        return free_memory() - max(0, self.need - taken)

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in another thread."""
        async with self._aside:
            return await asyncio.to_thread(work)

    async def aside_if(self, large: bool, work: Callable[[], T]) -> T:
        """The result of `work`, done in another thread where it would hold up the event loop."""
        return await self.aside(work) if large else work()

    async def restricted(
        self, adjustments: Adjustments | None, grammar: Grammar | None
    ) -> Adjustments | None:
        """`adjustments` with a grammar, compiled in another thread. Raises GrammarError."""
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
        pooling: Pooling | None = None,
        keep_logits: bool = False,
    ) -> AsyncIterator[AsyncIterator[tuple[int, Output]]]:
        """(prompt's place, output) of each prompt with its options, as they come. What still runs
        at the end is cancelled. Raises Busy, Stopped, and TimeoutError out of the iterator."""
        # None: the time is over. Before Python 3.12 asyncio.wait_for ignores a cancellation that
        # comes together with an output: the request of a client that has left would run on.
        outputs: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.request_timeout
        handles = []

        async def each() -> AsyncIterator[tuple[int, Output]]:
            while (found := await outputs.get()) is not None and loop.time() < deadline:
                yield found
            raise TimeoutError

        if adapter is not None:
            self.adapter_of(adapter)  # it may have gone since the request came
            self.adapter_uses[adapter] += 1
        timer = loop.call_at(deadline, outputs.put_nowait, None)
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
                    pooling=pooling,
                    keep_logits=keep_logits,
                )

                def put(output: Output, place: int = place) -> None:
                    outputs.put_nowait((place, output))

                handle = self.engine.submit(request, put, special_tokens=special_tokens)
                handles.append(handle)
            yield each()
        finally:
            timer.cancel()
            for handle in handles:
                self.engine.cancel(handle)
            if adapter is not None:
                self.adapter_uses[adapter] -= 1
                if not self.adapter_uses[adapter]:
                    del self.adapter_uses[adapter]  # names come and go without end


class Gone(Exception):
    """The client has disconnected."""


async def cancel_on_disconnect(work: Awaitable[T], left: Awaitable[None]) -> T:
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
