"""Starting the server and ending it: the socket, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from lite_runner import progress
from lite_runner.config.api_key import read_key
from lite_runner.errors import EnvironmentFault
from lite_runner.plan.loading import load
from lite_runner.plan.plan import Plan
from lite_runner.serving.adapters import opener
from lite_runner.serving.app import application
from lite_runner.serving.engine import Engine, Output, Put
from lite_runner.serving.metrics import Metrics
from lite_runner.serving.options import ServeOptions
from lite_runner.serving.state import Server
from lite_runner.system.signals import offered

if TYPE_CHECKING:
    from lite_runner.backends.base import Backend

# Of an idle connection. Clients drop theirs after 5 s (httpx, openai) to 15 s (aiohttp): were it no
# longer, a request could meet a connection that is just being closed.
KEEP_ALIVE_S = 75
_BACKLOG = 128  # connections that the kernel holds


def serve(plan: Plan) -> None:
    """Load the model and serve until SIGTERM or Ctrl-C. Raises RunnerError."""
    config = plan.config
    assert isinstance(config, ServeOptions)
    key = read_key("serve.api_key", config.serve.api_key)
    # Before the weights are read: the port may be taken.
    with closing(listen(config.serve.host, config.serve.port)) as bound:
        backend = load(config, plan.model, plan.device, plan.work, plan.tokenizer, need=plan.memory)
        with closing(backend):
            backend.prepare()
            asyncio.run(_serve(plan, backend, bound, key))


def open_server(plan: Plan, backend: Backend, key: bytes | None) -> Server:
    """The server of a loaded model, for the event loop that runs; its engine is not started."""
    config, adapters, loop = plan.config, plan.work.adapters, asyncio.get_running_loop()
    assert isinstance(config, ServeOptions) and plan.tokenizer is not None

    def spread(outputs: Sequence[tuple[Put, Output]]) -> None:
        for put, output in outputs:
            put(output)

    def post(outputs: Sequence[tuple[Put, Output]]) -> None:
        loop.call_soon_threadsafe(spread, outputs)

    engine = Engine(
        backend,
        plan.tokenizer,
        token_budget=config.serve.token_budget,
        prefix_cache=config.prefix_cache == "auto",
        max_queue=config.serve.max_queue,
        post=post,
    )
    slots = backend.adapters
    return Server(
        engine,
        plan.tokenizer,
        config.model_name,
        tuple(one.name for one in adapters.adapters) if adapters else (),
        plan.work.generation,
        config.serve,
        key,
        Metrics(config.model_name, lambda: engine.load, slots.slots if slots else 0),
        open_adapter=opener(plan, slots),
    )


async def _serve(plan: Plan, backend: Backend, bound: socket.socket, key: bytes | None) -> None:
    server = open_server(plan, backend, key)
    engine, settings = server.engine, server.settings
    http = _Http(
        uvicorn.Config(
            application(server),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
        )
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # requests are logged by Guard
    engine.start()
    try:
        with _stopping(http, server, asyncio.get_running_loop()):
            host, port = bound.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            progress.note(f"serving {server.name} on http://{shown}:{port} (Ctrl-C ends it)")
            await http.serve([bound])
    finally:
        await asyncio.to_thread(engine.close)


class _Http(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are this process's own: see _stopping."""
        yield


@contextmanager
def _stopping(
    http: uvicorn.Server, server: Server, loop: asyncio.AbstractEventLoop
) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the server once running requests are done; a second one at once."""

    def stop() -> None:
        if server.draining:
            http.force_exit = True
            return
        server.draining = http.should_exit = True
        progress.note("ending: running requests are completed; Ctrl-C again ends them")

    def take() -> bool:
        loop.call_soon_threadsafe(stop)
        return True

    before = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        with offered(take):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and listens. Raises EnvironmentFault."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        raise EnvironmentFault(
            f"serve.host={host}, serve.port={port}: {error.strerror or error}",
            "serve.port=0 takes a free one",
        ) from error
    return bound
