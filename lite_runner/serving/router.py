"""Several models behind one address: each in a process of its own, started on demand. A process is
a server of one model on a socket that only this user can reach; requests and answers are forwarded
unchanged. What a process took is the system's again when it ends, whatever its backend.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import h11
from prometheus_client import Gauge
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lite_runner import progress
from lite_runner.config import bytes_of
from lite_runner.errors import EnvironmentFault
from lite_runner.plugins import registered
from lite_runner.records import dataclass
from lite_runner.serving import static
from lite_runner.serving.app import (
    HANDLERS,
    disconnected,
    event,
    guarded,
    model_response,
    models_response,
    version,
)
from lite_runner.serving.errors import ApiError, shortened
from lite_runner.serving.listening import check_certificate, listen
from lite_runner.serving.metrics import ServerMetrics, merged
from lite_runner.serving.middleware import parse_body, read_body
from lite_runner.serving.options import Serve
from lite_runner.serving.server import Planned, http_server, run_model, serve_until_stopped
from lite_runner.serving.state import Gone, cancel_on_disconnect, is_stored
from lite_runner.system.secret import named_keys, take_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_CHAT = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
_BY_MODEL = (  # requests for the model that the body names
    *(*_CHAT, "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/embeddings"),
    *("/v1/rerank", "/tokenize", "/detokenize"),
)
# Of one connection alone, or said anew by each server.
_HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"date", b"x-request-id")
_FROM_CLIENT = (*_HOP, b"content-length", b"expect", b"x-forwarded-for", b"x-forwarded-proto")
_READ = 1 << 16
_SHORT = 16 << 10  # bytes of a body that is read in less time than another thread takes
_END_S = 20.0  # for a process to end by itself
_RETRY_S = 5  # for a client that has waited for a model


class _Named(BaseModel):
    """The model named by a body."""

    model: str | None = None


@dataclass(eq=False)
class ServedModel:
    """One of the models, and its process while it has one."""

    name: str
    config: Mapping[str, Any]  # of ServeOptions, as plain data
    state: Literal["unloaded", "loading", "loaded"] = "unloaded"
    names: tuple[str, ...] = ()  # with its adapters, once it was loaded
    max_length: int | None = None
    bytes: int = 0  # that it takes, by its own estimate
    users: int = 0  # requests that wait for it, or run
    used: float = 0.0  # when the last of them was over
    path: str = ""  # of its socket
    loads: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None  # notices where the process ends
    process: Any = None
    pipe: Pipe | None = None  # it runs until this is closed


def _is_loaded(model: ServedModel) -> float:
    return model.state == "loaded"


class Models:
    """The models of a server."""

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        settings: Serve,
        key: bytes | None,
        planned: Planned,
    ) -> None:
        """`settings`: of the address; those of a model are its own, whose plan is `planned`."""
        # Each model's server counts what a key may ask of it.
        self.settings = replace(settings, requests_per_minute=None, tokens_per_minute=None)
        self.keys = named_keys(key)
        self.every = {name: ServedModel(name, config) for name, config in configs.items()}
        self.metrics = ServerMetrics()
        loaded = Gauge(
            "lite_runner:model_loaded",
            "1 for a model that is loaded.",
            ("model_name",),
            registry=self.metrics.registry,
        )
        for name, model in self.every.items():
            loaded.labels(name).set_function(partial(_is_loaded, model))
        self.created = int(time.time())
        self.draining = False
        self._key, self._planned = key, planned
        self._most = None if settings.memory is None else bytes_of(settings.memory)
        self._folder = tempfile.TemporaryDirectory(prefix="lite-runner-")
        self._numbers = itertools.count()
        self._changes = asyncio.Condition()
        self._one_loads = asyncio.Lock()

    def find(self, name: str | None) -> ServedModel:
        """The model, or that of the adapter, of this name; None: the first. Raises ApiError."""
        for model in self.every.values():
            if name in (None, model.name) or name in model.names:
                return model
        raise ApiError(
            404,
            f"model: no model {shortened(str(name), 100)!r}; available: {', '.join(self.every)}",
            "model",
            "model_not_found",
        )

    def responses_file(self, model: ServedModel) -> Path:
        """The file of a model's responses while it is not loaded."""
        return Path(self._folder.name, f"{list(self.every).index(model.name)}.responses")

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.every.values() if model.state == "loaded"]

    async def enter(self, model: ServedModel, limit: float | None = None) -> None:
        """Wait until a model is loaded, `limit` seconds at most; it then stays until `leave`.
        Raises ApiError."""
        model.users += 1
        try:
            if model.state != "loaded":
                await self._wait_for(model, limit)
        except BaseException:
            await self.leave(model)
            raise

    async def leave(self, model: ServedModel) -> None:
        """A request has finished."""
        model.users, model.used = model.users - 1, time.monotonic()
        async with self._changes:
            self._changes.notify_all()

    async def _wait_for(self, model: ServedModel, limit: float | None) -> None:
        if model.loads is None:
            model.loads = asyncio.create_task(self._load(model))
            # Its exception, which asyncio would report where no task waits any more.
            model.loads.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait_for(asyncio.shield(model.loads), limit)
        except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
            why = f"model: {model.name} was not loaded within {limit:g} s (serve.load_timeout)"
            raise ApiError(503, why, "model", "model_loading", _RETRY_S) from None
        except asyncio.CancelledError:
            if model.users == 1:  # no other task waits for it
                model.loads.cancel()
            raise

    async def _load(self, model: ServedModel) -> None:
        """Start a model's process once there is room. Raises ApiError."""
        model.state = "loading"
        try:
            async with self._one_loads:
                while not await self._started(model):
                    pass
        except EnvironmentFault as error:
            why = f"model: {model.name} is not loaded: {error.message}"
            progress.note(f"{why}\n  -> {error.hint}" if error.hint else why)
            raise ApiError(503, why, "model", "model_failed", _RETRY_S) from None
        finally:
            model.loads = None
            if model.state == "loading":
                await self._end(model)

    async def _started(self, model: ServedModel) -> bool:
        """Start a process; False if others had to make room first: try again. Raises
        EnvironmentFault."""
        ours, theirs = multiprocessing.Pipe()
        model.path = str(Path(self._folder.name, f"{next(self._numbers)}.sock"))
        model.process = multiprocessing.get_context("spawn").Process(
            target=run_model,
            args=(
                *(self._planned, model.config, registered(), self._key, model.path),
                *(self.responses_file(model), theirs),
            ),
            daemon=True,
        )
        model.pipe = ours
        await asyncio.to_thread(model.process.start)
        theirs.close()
        answer = await _receive(ours)
        if "error" not in answer:
            model.bytes = answer["bytes"]
            if self._most is not None and model.bytes > self._most:
                raise EnvironmentFault(
                    f"it needs {model.bytes / 1e9:.2f} GB of serve.memory={self.settings.memory}",
                    "serve.max_length= and serve.max_running= in its yaml take less",
                )
            while not self._fits(model):
                await self._make_room(model)
            ours.send("load")
            answer = await _receive(ours)
        if "error" in answer:  # maybe because of what others take
            await self._end(model, "loading")
            if answer["here"] and any(other.users == 0 for other in self.loaded):
                await self._make_room(model)
                return False
            raise EnvironmentFault(answer["error"], answer["hint"])
        model.names, model.max_length = tuple(answer["names"]), answer["max_length"]
        model.state = "loaded"
        model.watch = asyncio.create_task(self._watch(model))
        return True

    def _fits(self, model: ServedModel) -> bool:
        taken = sum(other.bytes for other in self.loaded)
        return self._most is None or taken + model.bytes <= self._most

    async def _make_room(self, model: ServedModel) -> None:
        """End the least recently used idle model, once there is one."""
        idle: list[ServedModel] = []
        async with self._changes:
            while not (idle := [other for other in self.loaded if other.users == 0]):
                await self._changes.wait()
        oldest = min(idle, key=lambda other: other.used)
        progress.note(f"{oldest.name} is unloaded to make room for {model.name}")
        await self._end(oldest)

    async def _watch(self, model: ServedModel) -> None:
        """Notice a process that ends unexpectedly."""
        process, loop = model.process, asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
        if model.process is process:
            progress.note(f"{model.name} has ended: exit code {process.exitcode}")
            await self._end(model)

    async def _end(
        self, model: ServedModel, state: Literal["unloaded", "loading"] = "unloaded"
    ) -> None:
        """End a model's process, and wait until its memory is free."""
        process, pipe = model.process, model.pipe
        model.state, model.process, model.pipe = state, None, None
        if process is not None and pipe is not None:
            await asyncio.to_thread(_ended, process, pipe)
        async with self._changes:
            self._changes.notify_all()

    def close(self) -> None:
        """End all processes."""
        running = []
        for model in self.every.values():
            if model.process is not None and model.pipe is not None:
                model.pipe.close()
                running.append((model.process, model.pipe))
            model.process = model.pipe = None
        for process, pipe in running:
            _ended(process, pipe)
        self._folder.cleanup()


def _ended(process: Any, pipe: Pipe) -> None:
    pipe.close()
    if process.ident is None:
        return
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()


async def _receive(pipe: Pipe) -> dict[str, Any]:
    """The next message of a process."""
    try:
        while not pipe.poll():
            await _readable(pipe.fileno())
        message: dict[str, Any] = pipe.recv()
    except (EOFError, OSError):
        return {"error": "its process ended", "hint": "", "here": True}
    return message


async def _readable(file: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)


def routed(models: Models) -> Starlette:
    app = Starlette(
        routes=[
            Route("/v1/models", listed),
            Route("/v1/models/{name:path}", one),
            *(Route(path, by_model, methods=["POST"]) for path in _BY_MODEL),
            Route("/v1/responses/{id}", find_response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/input_items", find_response),
            Route("/health", alive),
            Route("/live", alive),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
            *static.routes(),
        ],
        exception_handlers=HANDLERS,
    )
    app.state.server = models
    return app


def models_of(request: Request) -> Models:
    models: Models = request.app.state.server
    return models


async def listed(request: Request) -> Response:
    """All models, and the adapters of those that were loaded."""
    models = models_of(request)
    cards = [
        card(models, model, name)
        for model in models.every.values()
        for name in dict.fromkeys((model.name, *model.names))
    ]
    return models_response(request, cards)


async def one(request: Request) -> Response:
    models, name = models_of(request), request.path_params["name"]
    return model_response(request, card(models, models.find(name), name))


def card(models: Models, model: ServedModel, name: str) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "lite-runner",
        "root": name,
        "parent": None if name == model.name else model.name,
        "max_model_len": model.max_length,
        "state": model.state,
    }


async def alive(_: Request) -> Response:
    return Response()


async def ready(request: Request) -> Response:
    """200 while requests are taken: not while the server drains."""
    return Response(status_code=503 if models_of(request).draining else 200)


async def metrics(request: Request) -> Response:
    """The metrics of all loaded models and of this process."""
    models, texts = models_of(request), []
    for model in models.loaded:
        with suppress(OSError, h11.RemoteProtocolError):
            _, body = await answer(model, request, b"")
            texts.append(({"model_name": model.name}, body.decode()))
    texts.append(({}, models.metrics.text().decode()))
    whole = await asyncio.to_thread(merged, texts)
    return Response(whole, media_type="text/plain; version=0.0.4")


async def by_model(request: Request) -> Response:
    """The answer of the model named by the body, once it is loaded."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "Content-Type: expected application/json")
    models, body = models_of(request), bytearray()
    await read_body(request.stream(), body)
    if len(body) <= _SHORT:
        named = parse_body(body, _Named)
    else:
        named = await asyncio.to_thread(parse_body, body, _Named)
    model = models.find(named.model)
    await cancel_on_disconnect(
        models.enter(model, models.settings.load_timeout), disconnected(request)
    )
    return Forwarded(models, model, bytes(body))


async def find_response(request: Request) -> Response:
    """The answer of the model that has the response: loaded ones are asked in turn; another one
    that has it is loaded."""
    models, id = models_of(request), request.path_params["id"]
    for model in models.loaded:
        with suppress(OSError, h11.RemoteProtocolError):
            status, body = await answer(model, request, b"")
            if status != 404:
                return Response(body, status, media_type="application/json")
    for model in models.every.values():
        if model.state != "loaded" and await asyncio.to_thread(
            is_stored, models.responses_file(model), id
        ):
            limit = models.settings.load_timeout
            await cancel_on_disconnect(models.enter(model, limit), disconnected(request))
            return Forwarded(models, model, b"")
    why = f"no response {shortened(id, 100)!r}: unknown, or no longer stored"
    raise ApiError(404, why, None, "response_not_found")


class Forwarded(Response):
    """The answer of a model's process, streamed."""

    def __init__(self, models: Models, model: ServedModel, body: bytes) -> None:
        self._models, self._model, self._body = models, model, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(Gone):
                await cancel_on_disconnect(
                    self._forward(scope, send), disconnected(Request(scope, receive))
                )
        finally:
            await self._models.leave(self._model)

    async def _forward(self, scope: Scope, send: Send) -> None:
        streams: bool | None = None  # None: nothing has been sent
        try:
            async with aclosing(exchange(self._model.path, scope, self._body)) as parts:
                async for part in parts:
                    if isinstance(part, h11.Response):
                        headers = [
                            (name, value) for name, value in part.headers if name not in _HOP
                        ]
                        streams = dict(headers).get(b"content-type", b"").startswith(b"text/event-")
                        scope["state"]["forwarded"] = True
                        start = {"type": "http.response.start", "status": part.status_code}
                        await send({**start, "headers": headers})
                    elif isinstance(part, h11.Data):
                        data = bytes(part.data)
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b""
        except (OSError, h11.RemoteProtocolError):
            error = ApiError(503, f"{self._model.name} has ended", code="unavailable")
            if streams is None:
                raise error from None
            last = event(error.body(scope["path"])) if streams else b""
        await send({"type": "http.response.body", "body": last})


async def answer(model: ServedModel, request: Request, body: bytes) -> tuple[int, bytes]:
    """The status and the body of a whole answer. Raises OSError, h11.RemoteProtocolError."""
    status, whole = 0, bytearray()
    async with aclosing(exchange(model.path, request.scope, body)) as parts:
        async for part in parts:
            if isinstance(part, h11.Response):
                status = part.status_code
            elif isinstance(part, h11.Data):
                whole += part.data
    return status, bytes(whole)


async def exchange(path: str, scope: Scope, body: bytes) -> AsyncGenerator[h11.Event, None]:
    """The head and the parts of the answer to a request, which is sent to the socket at `path`.
    Raises OSError, h11.RemoteProtocolError."""
    query = scope["query_string"]
    headers = [(name, value) for name, value in scope["headers"] if name not in _FROM_CLIENT]
    headers += [
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", scope["state"]["id"].encode()),
        (b"x-forwarded-for", (scope.get("client") or ("",))[0].encode()),
    ]
    http = h11.Connection(h11.CLIENT)
    target = scope["raw_path"] + (b"?" + query if query else b"")
    head = http.send(h11.Request(method=scope["method"], target=target, headers=headers)) or b""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(head)
        writer.write(body)
        http.send(h11.Data(body))
        http.send(h11.EndOfMessage())
        await writer.drain()
        while not isinstance(part := http.next_event(), h11.EndOfMessage):
            if part is h11.NEED_DATA:
                http.receive_data(await reader.read(_READ))
            elif isinstance(part, h11.Event):
                yield part
    finally:
        writer.close()


def serve_models(
    settings: Serve, configs: Mapping[str, Mapping[str, Any]], planned: Planned
) -> None:
    """Serve until SIGTERM or Ctrl-C, the first model loaded at once; `configs`: of each model, as
    plain data, whose plan is `planned`. Raises RunnerError."""
    key = take_key("serve.api_key", settings.api_key)
    check_certificate(settings)
    with closing(listen(settings.host, settings.port)) as bound:
        asyncio.run(_serve(Models(configs, settings, key, planned), settings, bound))


async def _serve(models: Models, settings: Serve, bound: Any) -> None:
    http = http_server(application(models), settings)
    try:
        first = next(iter(models.every.values()))
        await models.enter(first)
        await models.leave(first)
        await serve_until_stopped(http, models, bound, f"{', '.join(models.every)}", models.close)
    except ApiError as error:
        raise EnvironmentFault(error.message) from None
    finally:
        await asyncio.to_thread(models.close)


def application(models: Models) -> ASGIApp:
    return guarded(routed(models), models)
