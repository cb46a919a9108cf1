"""Middleware: limits on connections and bodies, and the key, id and log line of each request.

Parsing holds the interpreter's lock, whichever thread it is in, and the event loop needs it too. So
the values in a body are counted before anything is made of them.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import resource
import secrets
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import h11
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from lite_runner import profiler, progress
from lite_runner.serving import static
from lite_runner.serving.errors import (
    OUT_OF_MEMORY,
    RETRY_AFTER_S,
    ApiError,
    of_validation,
    shortened,
)
from lite_runner.serving.tracing import exporter, spans_of, trace_of
from lite_runner.system.bucket import Bucket
from lite_runner.system.memory import check_memory, free_memory, return_freed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lite_runner.serving.metrics import RequestStats, ServerMetrics
    from lite_runner.serving.options import Serve

PROBES = ("/health", "/live", "/ready")  # asked by machines, at the server's address
OPEN = (*PROBES, *static.FILES)  # without a key
_QUIET = (*OPEN, "/metrics")  # without a log line: they are asked for often
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
MAX_PATH = 200  # characters of it in a line of the log
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
WRONG_KEY_S = 0.5  # delay before a wrong key is refused, against guessing
WRONG_KEY_LINES_S = 1.0  # between two lines of the log on wrong keys
HEAD_S = 20.0  # from connecting, or from the first byte of a later request
# Descriptors for what is not a connection, and for those that are accepted at once.
_KEPT = 384
BODY_S = 60.0  # for all of a body
_ANSWER_S = 5.0  # for the answer that it has not come
_READ = 1 << 16  # bytes of a connection that are read at a time
_CONTENT = to_json(OUT_OF_MEMORY.body())
_OUT_OF_MEMORY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Retry-After: %d\r\nContent-Length: %d\r\n\r\n%b" % (RETRY_AFTER_S, len(_CONTENT), _CONTENT)
)
MAX_BODY = 8 << 20  # bytes
_UNCHECKED = 1 << 18  # bytes of a body between two looks at the free memory, of 0.5 ms each
MAX_VALUES = 1 << 18  # in a body; parsing and validating them takes some 30 ms
_OPENING = b",:[{"  # each value but the first has one of these before it
_PART = 1 << 18  # bytes that are looked at together
# To where no escape is cut: a character, or backslashes and the one behind them.
_ESCAPED = re.compile(rb"\\*[^\\]?", re.DOTALL)
Body = TypeVar("Body", bound=BaseModel)


class RateLimits:
    """Rate limits of a key, per minute: a bucket for each kind that is limited."""

    def __init__(self, settings: Serve) -> None:
        asked = {"requests": settings.requests_per_minute, "tokens": settings.tokens_per_minute}
        self.buckets = {
            kind: Bucket(most, most / 60) for kind, most in asked.items() if most is not None
        }

    def error(self) -> ApiError | None:
        """The reason to refuse a request, else None and it is counted."""
        for kind, bucket in self.buckets.items():
            if (seconds := bucket.seconds_until(1)) > 0:
                return ApiError(
                    429,
                    f"more than {bucket.most} {kind} per minute (serve.{kind}_per_minute)",
                    code="rate_limit_exceeded",
                    retry_after=math.ceil(seconds),
                )
        self.take("requests", 1)
        return None

    def take(self, kind: str, amount: int) -> None:
        if kind in self.buckets:
            self.buckets[kind].take(amount)

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's."""
        found = {}
        for kind, bucket in self.buckets.items():
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.most)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.available)))
            found[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.most):.3f}s"
        return found


class Guarded(Protocol):
    """The application behind a Guard: a server of one model, or of several."""

    settings: Serve

    @property
    def keys(self) -> Mapping[str, bytes]:
        """API keys by name; empty: none is required."""

    @property
    def metrics(self) -> ServerMetrics:
        """Counts refused requests."""


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, server: Guarded) -> None:
        self._app, self._server = app, server
        settings = server.settings
        self._limits = {name: RateLimits(settings) for name in (*server.keys, None)}
        self._exporter = exporter()
        self._wrong_keys = 0  # since the last line of the log on them
        self._last_line = -WRONG_KEY_LINES_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        status = 0
        limits: RateLimits | None = None  # None: the request is not counted

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["X-Request-Id"] = id
                answer["X-Content-Type-Options"] = "nosniff"
                if limits is not None:
                    answer.update(limits.headers)
            await send(message)

        state = scope.setdefault("state", {})
        state["id"] = id
        try:
            error = self._error(scope, headers)
            if error is None and _is_counted(scope):
                limits = self._limits[scope["state"].get("key")]
                error = limits.error()
            if error is not None:
                self._server.metrics.refused(error.status)
                if error.status == 401:
                    await asyncio.sleep(WRONG_KEY_S)
                response = JSONResponse(
                    error.body(scope["path"]), error.status, headers=error.headers
                )
                await response(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        finally:
            self._account(scope, limits)
            if status == 401:
                self._count_wrong_key((scope.get("client") or ("?",))[0])
            elif scope["path"] not in _QUIET and "forwarded" not in state:
                self._record(scope, status, began)
                self._log(scope, status, time.perf_counter() - began, id)
                self._trace(scope, status, began, headers.get("traceparent", ""))

    def _trace(self, scope: Scope, status: int, began: float, parent: str) -> None:
        """Export the spans of a request."""
        if self._exporter is None or (trace := trace_of(parent)) is None:
            return
        path = shortened(scope["path"], MAX_PATH)
        attributes = {
            "http.request.method": scope["method"],
            "url.path": path,
            "http.response.status_code": status or 499,
        }
        name, stats = f"{scope['method']} {path}", scope["state"].get("stats")
        self._exporter.put(spans_of(trace, name, began, attributes, stats))

    @staticmethod
    def _record(scope: Scope, status: int, began: float) -> None:
        """Record a request in the profile, if one is recorded; unknown paths have no name."""
        recorder = profiler.recorder
        if recorder is None or scope["path"] == "/start_profile":
            return
        path = "unknown path" if status == 404 else scope["path"][:MAX_PATH]
        more: dict[str, Any] = {"status": status}
        if (stats := scope["state"].get("stats")) is not None:
            more["prompt_tokens"] = stats.usage.prompt
            more["new_tokens"] = stats.usage.completion
        recorder.request(f"{scope['method']} {path}", began, time.perf_counter(), **more)

    def _account(self, scope: Scope, limits: RateLimits | None) -> None:
        """Count the usage of a key; forwarded requests are counted by the model's own server."""
        state = scope["state"]
        stats: RequestStats | None = state.get("stats")
        if (name := state.get("key")) is not None and "forwarded" not in state:
            self._server.metrics.count_request(name, stats)
        if limits is not None and stats is not None:
            limits.take("tokens", stats.usage.prompt + stats.usage.completion)

    def _error(self, scope: Scope, headers: Headers) -> ApiError | None:
        """The reason to refuse a request before its body is read."""
        settings, keys = self._server.settings, self._server.keys
        # A page elsewhere may have its own name resolve to this machine (DNS rebinding).
        if (settings.allowed_hosts or not settings.is_public) and scope["path"] not in PROBES:
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if not _is_allowed(name, (*_LOCAL, settings.host, *settings.allowed_hosts)):
                return ApiError(
                    400, f"Host: {name[:100]!r} is none of {_LOCAL[0]} and serve.allowed_hosts"
                )
        if not keys or scope["path"] in OPEN:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        sent = (given if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))
        for name, key in keys.items():
            if any(hmac.compare_digest(one.strip().encode(), key) for one in sent):
                scope["state"]["key"] = name
                return None
        return ApiError(401, "Authorization: expected Bearer and the server's key")

    def _count_wrong_key(self, client: str) -> None:
        """At most one line a second."""
        self._wrong_keys += 1
        wait = self._last_line + WRONG_KEY_LINES_S - time.monotonic()
        if wait <= 0:
            self._log_wrong_keys(client)
        elif self._wrong_keys == 1:  # the others until then are in the same line
            asyncio.get_running_loop().call_later(wait, self._log_wrong_keys, client)

    def _log_wrong_keys(self, client: str) -> None:
        if self._wrong_keys:
            line = {"client": client, "error": "wrong key", "requests": self._wrong_keys}
            progress.event("request", line)
            self._wrong_keys, self._last_line = 0, time.monotonic()

    def _log(self, scope: Scope, status: int, seconds: float, id: str) -> None:
        """One line a request; 499: the client disconnected before the answer began. `error`: why a
        started stream is incomplete."""
        call: Any = scope["state"].get("stats")
        line = {
            "id": id,
            "client": (scope.get("client") or ("?",))[0],
            "method": scope["method"],
            "path": shortened(scope["path"], MAX_PATH),
            "status": status or 499,
            "seconds": round(seconds, 3),
        }
        if call is not None:
            usage = call.usage
            line |= {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
            line["cached_tokens"] = usage.cached
        if (error := scope["state"].get("cut")) is not None:
            line["error"] = error
        progress.event("request", line)


def _is_counted(scope: Scope) -> bool:
    """True if a request counts towards the limits of its key: one for an answer of the model."""
    path: str = scope["path"]
    return scope["method"] == "POST" and path.startswith("/v1/")


def _is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """True if `allowed` has a name of `Host`; "*.example.com" is any below that, "*" any at
    all."""
    return "*" in allowed or any(
        name.lower() == one.lower() or (one[:2] == "*." and name.lower().endswith(one[1:].lower()))
        for one in allowed
    )


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's, which bounds the time between two requests alone. A buffer that is there already,
    and an answer where memory ends: asyncio would reset the connection."""

    _buffer = memoryview(bytearray(_READ))  # of all connections: each copies what it has got
    _awaited: object = None  # h11's state of the client whose time is bounded
    _limit: asyncio.TimerHandle | None = None  # on that time
    _refused = False  # read and dropped: otherwise the client might not see the answer

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._refused:
            return
        try:
            self.data_received(bytes(self._buffer[:nbytes]))
        except MemoryError:
            self._refuse()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > most_connections():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # it would hold this connection
        self._bound(None)

    def _watch(self) -> None:
        """Bound the time of what is awaited: a head, or a body, which may be of no use any more."""
        # uvicorn's own timer runs between two requests, and ends with the next byte.
        state = self.conn.their_state if self.timeout_keep_alive_task is None else None
        if state is not self._awaited:
            self._awaited = state
            in_body = BODY_S + _ANSWER_S if state is h11.SEND_BODY else None
            self._bound(HEAD_S if state is h11.IDLE else in_body)

    def _bound(self, seconds: float | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        end = self.transport.abort
        self._limit = None if seconds is None else self.loop.call_later(seconds, end)

    def _refuse(self) -> None:
        self._refused = True
        return_freed()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(_OUT_OF_MEMORY)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._bound(HEAD_S)

    def _make_room(self) -> None:
        """Close an idle connection, or the new one if none is idle."""
        for other in self.connections:
            if isinstance(other, Connection) and other is not self and other._is_idle:
                other.transport.abort()
                return
        self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        answered = self._refused or self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.is_closing()


def most_connections() -> int:
    """So many that descriptors are left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_KEPT, soft) - _KEPT + 16 if soft != resource.RLIM_INFINITY else 1 << 20


async def read_body(
    parts: AsyncIterable[bytes], data: bytearray, left: Callable[[], int] = free_memory
) -> None:
    """Append a body to `data`. Raises ApiError beyond MAX_BODY, or BODY_S; MemoryError where `left`
    has too few bytes for it: where a cgroup's end, the system kills without a warning."""
    try:
        await asyncio.wait_for(_append(parts, data, left), BODY_S)
    except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
        raise ApiError(408, f"the body was not received within {BODY_S:g} s") from None


async def _append(parts: AsyncIterable[bytes], data: bytearray, left: Callable[[], int]) -> None:
    unchecked = 0
    async for part in parts:
        data += part
        unchecked += len(part)
        if unchecked > _UNCHECKED:
            unchecked = 0
            check_memory(len(data), left())
        elif len(data) > _READ:
            check_memory(len(data))
        if len(data) > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY} bytes")


def parse_body(data: bytes | bytearray, kind: type[Body]) -> Body:
    """A body. Raises ApiError for one that is not valid, or has more than MAX_VALUES values."""
    check_values(data)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise of_validation(error) from None


def check_values(data: bytes | bytearray) -> None:
    """Raises ApiError for a JSON text of more than MAX_VALUES values."""
    # With those in strings, which is enough to know of nearly all bodies.
    if _count(np.frombuffer(data, np.uint8)) > MAX_VALUES and _values(data) > MAX_VALUES:
        raise ApiError(413, f"the body has more than {MAX_VALUES} values")


def _values(data: bytes | bytearray) -> int:
    """Commas, colons and opening brackets outside strings, as far as they may be."""
    count, start, inside = 0, 0, np.False_
    while start < len(data) and count <= MAX_VALUES:
        found = _ESCAPED.match(data, min(start + _PART, len(data)) - 1)
        assert found is not None  # it matches anything
        part = data[start : found.end()].replace(b"\\\\", b"__").replace(b'\\"', b"__")
        text, start = np.frombuffer(part, np.uint8), found.end()
        quoted = np.logical_xor.accumulate(text == ord('"')) ^ inside
        count, inside = count + _count(text[~quoted]), quoted[-1]
    return count


def _count(text: NDArray[np.uint8]) -> int:
    """NumPy releases the GIL."""
    return sum(int(np.count_nonzero(text == opening)) for opening in _OPENING)
