"""Batch files of OpenAI's form: one request a line, answered without a socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import to_json
from starlette.types import ASGIApp, Message

from lite_runner import progress
from lite_runner.backends import Backend
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.plan.resources import open_planned
from lite_runner.serving.app import routed
from lite_runner.serving.errors import ApiError, of_validation
from lite_runner.serving.middleware import MAX_BODY, check_values
from lite_runner.serving.options import Serve, ServePlan
from lite_runner.serving.schemas import RequestBody
from lite_runner.serving.server import open_server
from lite_runner.serving.state import Server

_MAX_SHOWN = 10  # lines that are wrong
_RETRY_S = 0.2  # when the queue or the memory is full
_HEAD = b'{"id":"batch_req_'  # of a line of answers


class BatchLine(RequestBody):
    """A request of a batch."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
    ]
    body: dict[str, Any]


class BatchAnswer(RequestBody):
    """The fields of an answer that a later run reads."""

    id: str
    custom_id: str
    response: dict[str, Any]
    error: None = None


def read_batch(serve: Serve) -> int:
    """The number of requests in serve.batch. Raises ConfigError with the lines that are wrong, and
    for an output that is not this batch's."""
    ids: dict[str, int] = {}
    wrong: list[str] = []
    for number, data in _lines(Path(serve.batch)):
        try:
            line = _line(data)
        except ApiError as error:
            wrong.append(f"{serve.batch}:{number}: {error.message}")
            continue
        if line.custom_id in ids:
            at = ids[line.custom_id]
            wrong.append(f"{serve.batch}:{number}: custom_id: the same as in line {at}")
        ids[line.custom_id] = number
    if wrong:
        raise ConfigError.of(wrong, _MAX_SHOWN)
    if not ids:
        raise ConfigError(f"serve.batch: {serve.batch} has no requests; expected one per line")
    for name in answered(serve.batch_target):
        if name not in ids:
            raise _not_ours(f"{serve.batch_target} answers {name!r}, which is not in {serve.batch}")
    return len(ids)


def answered(path: Path) -> set[str]:
    """The custom_ids in a file of answers, without one that was being written. Raises ConfigError
    for another file."""
    found = set()
    for number, data in _lines(path) if path.exists() else ():
        try:
            if not data.startswith(_HEAD[: len(data)]):
                raise ValueError
            if data.endswith(b"\n"):
                found.add(BatchAnswer.model_validate_json(data).custom_id)
        except ValueError:
            raise _not_ours(f"{path}:{number}: not an answer of a batch") from None
    return found


def run_batch(plan: ServePlan) -> str:
    """Answer the remaining requests; returns the engine's name. Raises RunnerError."""
    target = plan.serve.batch_target
    with target.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentFault(f"{target}: another run writes it") from None
        done = answered(target)
        _drop_torn(target)
        with closing(open_planned(plan)) as backend:
            backend.prepare()
            asyncio.run(_answer_all(plan, backend, file, done))
            return backend.info.engine


async def _answer_all(plan: ServePlan, backend: Backend, file: IO[bytes], done: set[str]) -> None:
    """Append an answer for each remaining request, in order of completion."""
    server = open_server(plan, backend, None)
    path, slots = Path(server.settings.batch), backend.info.slots
    left = (one for _, data in _lines(path) if (one := _line(data)).custom_id not in done)
    total = sum(1 for _ in _lines(path)) - len(done)
    app, statuses, running = routed(server), Counter[int](), Counter[str]()

    async def work() -> None:
        for line in left:
            running["now"] += 1
            until = time.monotonic() + server.settings.request_timeout
            while True:
                status, answer = await ask(app, line)
                if server.engine.failure is not None:
                    raise EnvironmentFault(f"the engine failed: {server.engine.failure}")
                alone = running["now"] == 1
                if status not in (429, 503) or alone or time.monotonic() > until:
                    break
                await asyncio.sleep(_RETRY_S)
            running["now"] -= 1
            file.write(_written(line.custom_id, status, answer))
            file.flush()
            statuses[status] += 1
            step.advance()

    server.engine.start()
    # As many more as slots wait, so that none is empty while an answer is read.
    count = slots + min(slots, server.settings.max_queue)
    with progress.step("batch", total=total, unit="requests") as step:
        workers = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.to_thread(server.engine.close)
    _tell(server, len(done), statuses)


def _tell(server: Server, before: int, statuses: Counter[int]) -> None:
    refused = sum(count for status, count in statuses.items() if status != 200)
    counts = [f"{statuses[200]:,} answers"]
    if refused:
        counts.append(f"{refused:,} refused")
    if before:
        counts.append(f"{before:,} were there already")
    progress.note(f"wrote {server.settings.batch_target}: {', '.join(counts)}")


async def ask(app: ASGIApp, line: BatchLine) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    body, status, parts = [to_json(line.body)], 0, bytearray()

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop()}
        await asyncio.Event().wait()  # no client that disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": line.method,
        "path": line.url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {},
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not status:  # otherwise Starlette has answered, and raises it for the server
            raise
    return status, bytes(parts)


def _written(custom_id: str, status: int, body: bytes) -> bytes:
    """A line of answers."""
    number = secrets.token_hex(12).encode()
    response = b'{"status_code":%d,"request_id":"req_%b","body":%b}' % (status, number, body)
    name = to_json(custom_id)
    return b'%b%b","custom_id":%b,"response":%b,"error":null}\n' % (_HEAD, number, name, response)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of those that are not blank. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(iter(lambda: file.readline(_MOST_BYTES), b""), 1):
                if data.strip():
                    yield number, data
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


# Of a line; an answer may be longer than what was asked.
_MOST_BYTES = 16 * MAX_BODY


def _line(data: bytes) -> BatchLine:
    """Raises ApiError for one that is not valid."""
    if len(data) > MAX_BODY:
        raise ApiError(413, f"more than {MAX_BODY} bytes")
    check_values(data)
    try:
        line = BatchLine.model_validate_json(data)
    except ValidationError as error:
        raise of_validation(error) from None
    if line.body.get("stream"):
        raise ApiError(400, "body.stream: not available in a batch", "body.stream")
    return line


def _not_ours(why: str) -> ConfigError:
    return ConfigError(why, "serve.batch_output=FILE names another file for the answers")


def _drop_torn(path: Path) -> None:
    """Cut off an answer that was being written when a run was killed."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        file.truncate(end)
