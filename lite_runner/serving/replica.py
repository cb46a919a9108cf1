"""What runs on a Ray cluster: replicas of the server, and the ingress that routes to them.

A replica is the whole ASGI application over a model of its own. The ingress reads which adapter a
request names, which Ray Serve needs to prefer a replica that has it loaded (model multiplexing),
and passes the messages of ASGI on; everything else, such as keys and limits, is the application's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse

from lite_runner import progress
from lite_runner.plan.loading import load
from lite_runner.plugins import register_plugins
from lite_runner.serving.app import MAX_BODY, application, event
from lite_runner.serving.errors import ApiError
from lite_runner.serving.options import ServeOptions
from lite_runner.serving.planning import plan_serving
from lite_runner.serving.server import open_server
from lite_runner.system.json_file import parse_json

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What the application reads of a request; the rest of Ray's scope cannot be sent.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


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
        progress.configure(config.verbosity)
        plan = plan_serving(config)
        backend = load(config, plan.model, plan.device, plan.work, plan.tokenizer, need=plan.memory)
        backend.prepare()
        self._server = open_server(plan, backend, key)
        self._server.engine.start()
        self._app = application(self._server)
        slots = 1 if backend.adapters is None else backend.adapters.slots
        # Ray routes by the names that went through this; the scheduler loads adapters itself.
        self._hold = serve.multiplexed(max_num_models_per_replica=slots)(_name)

    async def check_health(self) -> None:
        """Raises where the engine has failed: Ray replaces this replica then."""
        if self._server.engine.failure is not None:
            raise RuntimeError("the engine has failed")

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """The messages that the application sends for a request."""
        if (adapter := serve.get_multiplexed_model_id()) in self._server.adapters:
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
        body = await _body(receive)
        if body is None:
            error = ApiError(413, f"the body has more than {MAX_BODY} bytes")
            await JSONResponse(error.body(), 413)(scope, receive, send)
            return
        named = self._named(body)
        handle = self._replicas.options(stream=True, multiplexed_model_id=named)
        messages = handle.answer.remote({name: scope.get(name) for name in _SCOPE}, body)
        streams: bool | None = None  # None: nothing has been sent
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    streams = headers["Content-Type"].startswith("text/event-stream")
                    del headers["X-Request-Id"]  # Ray's proxy adds it
                await send(message)
        except (RayError, RayServeException) as failure:
            progress.note(f"a replica has failed: {type(failure).__name__}")
            error = ApiError(503, "the replica of this request has failed", code="unavailable")
            if streams is None:
                answer = JSONResponse(error.body(), 503, headers=error.headers)
                await answer(scope, receive, send)
                return
            last = event(error.body()).encode() if streams else b""
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


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None: it is too long."""
    parts, more = bytearray(), True
    while more:
        message = await receive()
        parts += message.get("body", b"")
        if len(parts) > MAX_BODY:
            return None
        more = message.get("more_body", False)
    return bytes(parts)
