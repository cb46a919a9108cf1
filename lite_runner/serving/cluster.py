"""serve.engine=ray: a deployment of Ray Serve, which starts, routes to and replaces replicas.

A replica is the whole ASGI application over a model of its own. The door, in the process that was
started, reads what a request is routed by, and passes the messages of ASGI on; it asks all replicas
where a request concerns each: adapters that come and go, and metrics. Everything else, such as keys
and limits, is the application's. Ray's own HTTP proxy is not used: where the process behind it
dies, it answers in plain text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.request_router import RequestRouter
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lite_runner import progress
from lite_runner.errors import EnvironmentFault
from lite_runner.plan.resources import open_planned
from lite_runner.plugins import register_plugins, registered
from lite_runner.serving.adapters import load_lora, unload_lora
from lite_runner.serving.app import api_error, application, disconnected, event
from lite_runner.serving.errors import ApiError
from lite_runner.serving.listening import listen
from lite_runner.serving.metrics import merged
from lite_runner.serving.middleware import read_body
from lite_runner.serving.options import Serve, ServePlan
from lite_runner.serving.routing import key_of_body, ranked
from lite_runner.serving.schemas import LoadAdapter, UnloadAdapter
from lite_runner.serving.server import Planned, http_server, open_server, serve_until_stopped
from lite_runner.serving.state import Gone, cancel_on_disconnect
from lite_runner.system.files import parse_json
from lite_runner.system.secret import read_key

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, RunningReplica
    from starlette.types import Message, Receive, Scope, Send

APP = "lite-runner"
_RETRIES = 2  # of a replica that cannot be started
_ONGOING = 10_000  # requests of a replica: its engine refuses what is too much, with 429
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_METRICS_S = 5.0  # for the metrics of all replicas; 503 where one is late
_ACCEPT_S = 30.0  # until a replica accepts a request: there is none while all of them start
_ACCEPTED: Message = {"type": "accepted"}  # before the application's messages
# Fields of a request that the application reads; the rest of Ray's scope cannot be sent.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


def serve_on_ray(plan: ServePlan, planned: Planned, raw: Mapping[str, Any]) -> None:
    """Serve on the Ray cluster of this machine until SIGTERM or Ctrl-C; where there is none, on a
    cluster of this machine alone. Replicas plan by `planned`, from the config `raw` as plain data.
    Raises RunnerError."""
    settings, adapters = plan.serve, plan.work.adapters
    key = read_key("serve.api_key", settings.api_key)
    # As quiet as the server here: Guard logs the requests.
    logs = {"log_level": "WARNING", "enable_access_log": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # of this process
    with closing(listen(settings.host, settings.port)) as bound, _cluster():
        ray_serve.start(proxy_location="Disabled", logging_config=logs)
        if others := sorted(ray_serve.status().applications):
            raise EnvironmentFault(
                f"serve.engine=ray: the cluster serves {', '.join(others)} already",
                "serve shutdown ends what Ray Serve runs there",
            )
        try:
            arguments = (planned, raw, registered(), str(Path.cwd()), key)
            threads = plan.settings.context.threads or 1
            replicas = _deploy(settings, threads, arguments, logs)
            names = [one.name for one in adapters.adapters] if adapters else []
            door = Door(replicas, settings, names)
            asyncio.run(_serve(door, bound, plan.names[0]))
        finally:
            ray_serve.delete(APP)
            ray_serve.shutdown()


def _deploy(
    settings: Serve, cpus: int, arguments: tuple[Any, ...], logs: dict[str, object]
) -> DeploymentHandle:
    """Start replicas, made of these `arguments`, and wait until they are ready; `cpus`: of each."""
    replicas = ray_serve.deployment(
        Replica,
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": cpus},
        health_check_period_s=1,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=_RETRIES,
        max_ongoing_requests=_ONGOING,
    )
    bound = replicas.bind(*arguments)
    try:
        return ray_serve.run(bound, name=APP, route_prefix=None, logging_config=logs)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"serve.engine=ray: the replicas do not start: {str(error).strip()}",
            "serve.engine=local runs one in this process and shows its error",
        ) from error


async def _serve(door: Door, bound: socket.socket, name: str) -> None:
    http = http_server(door, door.settings)
    replicas = f"{door.settings.replicas} replicas on Ray"
    await serve_until_stopped(http, door, bound, name, door.close, replicas)


@contextmanager
def _cluster() -> Iterator[None]:
    """A connection to the cluster of this machine. Raises EnvironmentFault."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, logging_level="warning")
    except Exception as error:  # a bare one where a node takes too long to start
        raise EnvironmentFault(
            f"serve.engine=ray: no connection to the cluster: {str(error).strip()}",
            "ray start --head on this machine, ray start --address=... on workers",
        ) from error
    signal.signal(signal.SIGTERM, before)  # Ray's own ends the process with another exit code
    try:
        yield
    finally:
        ray.shutdown()


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's
    """Routes a request by the key that is the last argument of its call."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if no replica takes it
        named = {one.replica_id.unique_id: one for one in candidate_replicas}
        # Requests that were sent and are not over; unknown where none was for some seconds.
        lengths = self.replica_queue_len_cache
        running = {name: lengths.get(one.replica_id) or 0 for name, one in named.items()}
        return [[named[name]] for name in ranked(pending_request.args[-1], running)]


class AdapterFolders(NamedTuple):
    """The adapters that all replicas are to have."""

    version: int  # number of changes
    folders: Mapping[str, str | None]  # by their names; None: it has been there from the start


class Whole(NamedTuple):
    """The whole answer of a replica."""

    replica: str
    start: Message
    body: bytes

    @property
    def done(self) -> bool:
        return bool(self.start["status"] == 200)


class Replica:
    """A server of one model."""

    def __init__(
        self,
        planned: Planned,
        raw: Mapping[str, Any],
        plugins: Sequence[str],
        folder: str,
        key: bytes | None,
    ) -> None:
        """`raw`: a config as plain data, of which `planned` makes the plan; `folder`: where
        relative paths begin. Raises RunnerError, which Ray reports."""
        os.chdir(folder)
        register_plugins(plugins)
        plan = planned(raw)
        backend = open_planned(plan)
        backend.prepare()
        self._server = open_server(plan, backend, key)
        self._server.engine.start()
        self._app = application(self._server)
        self._folders: dict[str, str | None] = dict.fromkeys(self._server.adapters)
        self._adapters, self._following = AdapterFolders(0, {**self._folders}), asyncio.Lock()

    async def check_health(self) -> None:
        """Raises where the engine has failed: Ray replaces this replica then."""
        if self._server.engine.failure is not None:
            raise RuntimeError("the engine has failed")

    async def follow(self, adapters: AdapterFolders) -> None:
        """Load and unload the adapters that others have meanwhile."""
        async with self._following:
            if adapters.version <= self._adapters.version:
                return
            server, wanted = self._server, adapters.folders
            for name, folder in list(self._folders.items()):
                if name not in wanted or wanted[name] != folder:
                    await unload_lora(server, UnloadAdapter(lora_name=name))
                    del self._folders[name]
            for name, folder in wanted.items():
                if name not in self._folders and folder is not None:
                    try:
                        await load_lora(server, LoadAdapter(lora_name=name, lora_path=folder))
                        self._folders[name] = folder
                    except ApiError as error:
                        progress.note(f"adapter {name}: not loaded on this replica: {error}")
            self._adapters = adapters

    async def whole(self, scope: Scope, body: bytes, adapters: AdapterFolders) -> Whole:
        """The application's answer to a request that concerns each replica."""
        _, *messages = [message async for message in self.answer(scope, body, adapters, b"")]
        parts = [message.get("body", b"") for message in messages]
        replica = ray_serve.get_replica_context().replica_id.unique_id
        found = Whole(replica, messages[0], b"".join(parts))
        if found.done and scope["path"] in (_LOAD, _UNLOAD):
            _apply(scope["path"], body, self._folders)
        return found

    async def answer(
        self, scope: Scope, body: bytes, adapters: AdapterFolders, key: bytes
    ) -> AsyncGenerator[Message, None]:
        """_ACCEPTED, then the messages that the application sends for a request; `key`: what it
        was routed by."""
        yield _ACCEPTED
        if adapters.version > self._adapters.version:
            await self.follow(adapters)
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await asyncio.Event().wait()  # the client leaves by cancelling this call
            raise AssertionError

        task = asyncio.ensure_future(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})


class Door:
    """The ASGI application in front of all replicas."""

    def __init__(
        self, replicas: DeploymentHandle, settings: Serve, adapters: Sequence[str]
    ) -> None:
        """`adapters`: the names of those that are there from the start."""
        self.settings, self.draining = settings, False
        self._replicas = replicas
        self._adapters = AdapterFolders(0, dict.fromkeys(adapters))
        self._changing = asyncio.Lock()
        self._running: set[Any] = set()  # awaited by the answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._forward(scope, receive, send)
        else:
            await Starlette()(scope, receive, send)

    def close(self) -> None:
        """End the answers that still run, with an error."""
        for messages in list(self._running):
            messages.cancel()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, answer = scope["path"], None
        messages: Any = None
        try:
            data = bytearray()
            await read_body(_parts(receive), data)
            body, asked = bytes(data), {name: scope.get(name) for name in _SCOPE}
            adapters = self._adapters
            key = await asyncio.to_thread(key_of_body, path, body, adapters.folders)
            if path == "/ready" and self.draining:
                answer = Response(status_code=503)
            elif path in (_LOAD, _UNLOAD):
                answer = await self._change(asked, body)
            elif path == "/metrics":
                answer = await self._metrics(asked)
            else:
                replicas = self._replicas.options(stream=True)
                messages = replicas.answer.remote(asked, body, adapters, key)
        except Exception as failure:
            answer = _refusal(_failed(failure), path)
        if answer is not None:
            await answer(scope, receive, send)
            return
        self._running.add(messages)
        try:
            left = disconnected(Request(scope, receive))
            await cancel_on_disconnect(self._pass(messages, scope, receive, send), left)
        except Gone:
            messages.cancel()
        finally:
            self._running.remove(messages)

    async def _pass(self, messages: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages of a replica as they come."""
        streams: bool | None = None  # None: nothing has been sent
        try:
            try:
                await asyncio.wait_for(anext(messages), _ACCEPT_S)
            except TimeoutError:
                messages.cancel()
                raise _NO_REPLICA from None
            async for message in messages:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    # /health has none.
                    streams = headers.get("Content-Type", "").startswith("text/event-stream")
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return  # at once: the next message is a disconnect
        except RequestCancelledError:
            if not self.draining:
                return  # the client has left
            await self._end(_STOPPED, streams, scope, receive, send)
        except Exception as failure:
            await self._end(_failed(failure), streams, scope, receive, send)

    @staticmethod
    async def _end(
        error: ApiError, streams: bool | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """End an answer with an error; `streams`: it has begun as events; None: not at all."""
        if streams is None:
            await _refusal(error, scope["path"])(scope, receive, send)
        elif streams:
            last = event(error.body(scope["path"]))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        # Of any other, uvicorn ends the connection: the client sees that it is not whole.

    async def _all(self, asked: Scope, body: bytes, seconds: float | None = None) -> list[Whole]:
        """The answers of all replicas but those that fail. Raises ApiError where none answers."""
        calls = self._replicas.broadcast("whole", asked, body, self._adapters)
        try:
            found = await calls.results_async(timeout_s=seconds, return_exceptions=True)
        except TimeoutError:
            raise ApiError(503, "not all replicas have answered", code="unavailable") from None
        for one in found:
            if isinstance(one, Exception):
                _failed(one)
        answers = [one for one in found if isinstance(one, Whole)]
        if not answers:
            raise _UNAVAILABLE
        return answers

    async def _metrics(self, asked: Scope) -> Response:
        answers = await self._all(asked, b"", _METRICS_S)
        for one in answers:
            if not one.done:  # such as a wrong key
                return _response(one)
        texts = [({"replica": one.replica}, one.body.decode()) for one in answers]
        whole = await asyncio.to_thread(merged, texts)
        return Response(whole, media_type="text/plain; version=0.0.4")

    async def _change(self, asked: Scope, body: bytes) -> Response:
        """Load or unload an adapter on all replicas. One that some cannot load stays on none."""
        async with self._changing:
            answers = await self._all(asked, body)
            done = [one for one in answers if one.done]
            refused = [one for one in answers if not one.done]
            if not done:
                return _response(refused[0])
            version, folders = self._adapters
            folders = {**folders}
            undone = asked["path"] == _LOAD and refused
            if not undone:
                _apply(asked["path"], body, folders)
            self._adapters = AdapterFolders(version + 1, folders)
            if undone:
                calls = self._replicas.broadcast("follow", self._adapters)
                await calls.results_async(return_exceptions=True)
            return _response((refused if undone else done)[0])


_UNAVAILABLE = ApiError(503, "the replica of this request has failed", code="unavailable")
_NO_REPLICA = ApiError(503, "no replica is ready: they are starting", code="unavailable")
_STOPPED = ApiError(503, "the server is shutting down", code="unavailable")


def _failed(failure: Exception) -> ApiError:
    """The error for the client; the log has a line."""
    if not isinstance(failure, (RayError, RayServeException)):
        return api_error(failure)
    progress.note(f"a replica has failed: {type(failure).__name__}")
    return _UNAVAILABLE


def _refusal(error: ApiError, path: str) -> Response:
    return JSONResponse(error.body(path), error.status, headers=error.headers)


def _response(answer: Whole) -> Response:
    response = Response(answer.body, answer.start["status"])
    response.raw_headers = [*answer.start["headers"]]
    return response


def _apply(path: str, body: bytes, folders: dict[str, str | None]) -> None:
    """Note in `folders` the adapter that a request has loaded or unloaded."""
    given = parse_json(body)
    if path == _LOAD:
        folders[given["lora_name"]] = given["lora_path"]
    else:
        folders.pop(given["lora_name"], None)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """The parts of a request's body."""
    more = True
    while more:
        message = await receive()
        yield message.get("body", b"")
        more = message.get("more_body", False)
