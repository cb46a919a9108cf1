"""serve.engine=ray: a deployment of Ray Serve, which starts, routes to and replaces replicas.

A replica is the whole ASGI application over a model of its own. The ingress reads which adapter a
request names, which Ray Serve needs to prefer a replica that has it loaded (model multiplexing),
and passes the messages of ASGI on; everything else, such as keys and limits, is the application's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse

from lite_runner import progress
from lite_runner.config.secret import read_key
from lite_runner.errors import EnvironmentFault
from lite_runner.plan.plan import Plan
from lite_runner.plan.resources import open_planned
from lite_runner.plugins import register_plugins, registered
from lite_runner.serving.app import application, event
from lite_runner.serving.errors import ApiError
from lite_runner.serving.middleware import check_values, read_body
from lite_runner.serving.options import ServeOptions
from lite_runner.serving.planning import listen, plan_serving
from lite_runner.serving.server import open_server
from lite_runner.system.json_file import parse_json
from lite_runner.system.signals import offered

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

APP = "lite-runner"
_RETRIES = 2  # of a replica that cannot be started
_ONGOING = 10_000  # requests of a replica: its engine refuses what is too much, with 429
# What the application reads of a request; the rest of Ray's scope cannot be sent.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


def serve_on_ray(plan: Plan) -> None:
    """Serve on the Ray cluster of this machine until SIGTERM or Ctrl-C; where there is none, on a
    cluster of this machine alone. Raises RunnerError."""
    config = plan.config
    assert isinstance(config, ServeOptions)
    key = read_key("serve.api_key", config.serve.api_key)
    with closing(listen(config.serve.host, config.serve.port)) as bound:
        host, port = bound.getsockname()[:2]  # it is free; Ray binds it anew
    # As quiet as the server here: Guard logs the requests.
    logs = {"log_level": "WARNING", "enable_access_log": False}
    with _cluster(), _stopping() as stopping:
        options = {"host": host, "port": port}
        ray_serve.start(proxy_location="HeadOnly", http_options=options, logging_config=logs)
        if others := sorted(ray_serve.status().applications):
            raise EnvironmentFault(
                f"serve.engine=ray: the cluster serves {', '.join(others)} already",
                "serve shutdown ends what Ray Serve runs there",
            )
        try:
            _deploy(config, plan, key, logs)
            shown = f"[{host}]" if ":" in host else host
            progress.note(
                f"serving {config.served_names[0]} on http://{shown}:{port} with"
                f" {config.serve.replicas} replicas on Ray (Ctrl-C ends it)"
            )
            stopping.wait()
            progress.note("ending: running requests are completed; Ctrl-C again ends them")
        finally:
            ray_serve.delete(APP)
            ray_serve.shutdown()


def _deploy(config: ServeOptions, plan: Plan, key: bytes | None, logs: dict[str, object]) -> None:
    """Start replicas and ingress, and wait until they are ready."""
    adapters = plan.work.adapters
    names = tuple(one.name for one in adapters.adapters) if adapters else ()
    ending = {
        "graceful_shutdown_timeout_s": config.serve.drain_timeout,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": _RETRIES,
        "max_ongoing_requests": _ONGOING,
    }
    replicas = ray_serve.deployment(
        Replica,
        num_replicas=config.serve.replicas,
        ray_actor_options={"num_cpus": config.context.threads or 1},
        health_check_period_s=1,
        **ending,
    )
    ingress = ray_serve.deployment(
        ray_serve.ingress()(Ingress), ray_actor_options={"num_cpus": 0}, **ending
    )
    bound = replicas.bind(config.to_dict(), registered(), str(Path.cwd()), key)
    try:
        ray_serve.run(ingress.bind(bound, names), name=APP, logging_config=logs)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"serve.engine=ray: the replicas do not start: {str(error).strip()}",
            "serve.engine=local runs one in this process and shows its error",
        ) from error


@contextmanager
def _cluster() -> Iterator[None]:
    """A connection to the cluster of this machine. Raises EnvironmentFault."""
    try:
        ray.init(include_dashboard=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EnvironmentFault(
            f"serve.engine=ray: no connection to the cluster: {str(error).strip()}",
            "ray start --head on this machine, ray start --address=... on workers",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Set by SIGTERM or the first Ctrl-C; the second one raises KeyboardInterrupt."""
    stopping = threading.Event()

    def take() -> bool:
        if stopping.is_set():
            return False
        stopping.set()
        return True

    before = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        with offered(take):
            yield stopping
    finally:
        signal.signal(signal.SIGTERM, before)


class Replica:
    """A server of one model."""

    def __init__(
        self, raw: Mapping[str, Any], plugins: Sequence[str], folder: str, key: bytes | None
    ) -> None:
        """`raw`: a config as plain data; `folder`: where relative paths begin. Raises RunnerError,
        which Ray reports."""
        os.chdir(folder)
        register_plugins(plugins)
        config = ServeOptions.from_dict(raw)
        progress.configure(config.verbosity, config.log_format)
        plan = plan_serving(config)
        backend = open_planned(plan)
        backend.prepare()
        self._server = open_server(plan, backend, key)
        self._server.engine.start()
        self._app = application(self._server)
        slots = 1 if backend.adapters is None else backend.adapters.slots
        # Ray routes by the names that went through this; the scheduler loads adapters itself.
        self._hold = ray_serve.multiplexed(max_num_models_per_replica=slots)(_name)

    async def check_health(self) -> None:
        """Raises where the engine has failed: Ray replaces this replica then."""
        if self._server.engine.failure is not None:
            raise RuntimeError("the engine has failed")

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """The messages that the application sends for a request."""
        if (adapter := ray_serve.get_multiplexed_model_id()) in self._server.adapters:
            await self._hold(adapter)
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


async def _name(name: str) -> str:
    return name


class Ingress:
    """The door: one for all replicas."""

    def __init__(self, replicas: DeploymentHandle, adapters: Sequence[str]) -> None:
        self._replicas, self._adapters = replicas, adapters

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def forward(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._forward(scope, receive, send)
            else:
                await Starlette()(scope, receive, send)

        return forward

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            data = bytearray()
            await read_body(_parts(receive), data)
            body = bytes(data)
            await asyncio.to_thread(check_values, body)
        except ApiError as refusal:
            await JSONResponse(refusal.body(scope["path"]), refusal.status)(scope, receive, send)
            return
        named = self._named(body)
        handle = self._replicas.options(stream=True, multiplexed_model_id=named)
        messages = handle.answer.remote({name: scope.get(name) for name in _SCOPE}, body)
        streams: bool | None = None  # None: nothing has been sent
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    # /health has none.
                    streams = headers.get("Content-Type", "").startswith("text/event-stream")
                    del headers["X-Request-Id"]  # Ray's proxy adds it
                await send(message)
        except (RayError, RayServeException) as failure:
            progress.note(f"a replica has failed: {type(failure).__name__}")
            error = ApiError(503, "the replica of this request has failed", code="unavailable")
            if streams is None:
                answer = JSONResponse(error.body(scope["path"]), 503, headers=error.headers)
                await answer(scope, receive, send)
                return
            last = event(error.body(scope["path"])) if streams else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            messages.cancel()  # of effect where the client has left

    def _named(self, body: bytes) -> str:
        """The adapter that a request names; "": none, or none that is known."""
        try:
            named: Any = parse_json(body)["model"]
        except (ValueError, TypeError, KeyError):
            return ""  # the application says what is wrong with it
        return named if named in self._adapters else ""


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """The parts of a request's body."""
    more = True
    while more:
        message = await receive()
        yield message.get("body", b"")
        more = message.get("more_body", False)
