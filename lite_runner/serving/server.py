"""Starting and stopping the server: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from lite_runner import progress
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.model.embedding import embedding_of
from lite_runner.plan.resources import open_planned
from lite_runner.plugins import register_plugins
from lite_runner.serving.adapters import opener, watch_of
from lite_runner.serving.app import application
from lite_runner.serving.engine import EngineThread, Output, Put
from lite_runner.serving.listening import listen
from lite_runner.serving.metrics import Metrics
from lite_runner.serving.middleware import Connection
from lite_runner.serving.options import Serve, ServePlan
from lite_runner.serving.state import Server
from lite_runner.system.memory import bound_arenas, shortage_error
from lite_runner.system.secret import take_key
from lite_runner.system.signals import offered

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from lite_runner.backends import Backend

# Of an idle connection. Clients drop theirs after 5 s (httpx, openai) to 15 s (aiohttp): were it no
# longer, a request could meet a connection that is just being closed.
KEEP_ALIVE_S = 75
_ARENAS = 2  # of malloc: each takes addresses, of which `ulimit -v` leaves some
# Of gc: closed connections have to go, whose transports in asyncio are cycles; the start
# (app.console) looks once per 100,000 objects. What was loaded is frozen: a look is short.
_GARBAGE = 2000, 5, 2
SWITCH_S = 0.001  # Python's 0.005 s, several times a request, are what others would notice
_LAST_S = 2  # for the last events of streams that are cut, where a client does not read


Planned = Callable[[Mapping[str, Any]], ServePlan]  # of a config as plain data, in another process


def serve(plan: ServePlan) -> None:
    """Load the model and serve until SIGTERM or Ctrl-C. Raises RunnerError."""
    key = take_key("serve.api_key", plan.serve.api_key)
    bound_arenas(_ARENAS)
    # Before the weights are read: the port may be taken.
    with closing(listen(plan.serve.host, plan.serve.port)) as bound:
        backend = open_planned(plan)
        with closing(backend):
            backend.prepare()
            asyncio.run(_serve(plan, backend, bound, key))


def open_server(plan: ServePlan, backend: Backend, key: bytes | None) -> Server:
    """The server of a loaded model, for the running event loop; its engine is not started."""
    serve, settings = plan.serve, plan.settings
    adapters, loop = plan.work.adapters, asyncio.get_running_loop()
    assert plan.tokenizer is not None

    def spread(outputs: Sequence[tuple[Put, Output]]) -> None:
        for put, output in outputs:
            put(output)

    def post(outputs: Sequence[tuple[Put, Output]]) -> None:
        loop.call_soon_threadsafe(spread, outputs)

    engine = EngineThread(
        backend,
        plan.tokenizer,
        token_budget=serve.token_budget,
        prefix_cache=settings.prefix_cache != "none",
        speculate=settings.looks_up,
        max_queue=serve.max_queue,
        post=post,
    )
    slots = backend.adapters
    pooling = None if serve.pooling == "auto" else serve.pooling
    return Server(
        engine,
        plan.tokenizer,
        plan.names,
        tuple(one.name for one in adapters.adapters) if adapters else (),
        plan.work.generation,
        serve,
        key,
        Metrics(
            plan.names[0],
            lambda: engine.load,
            slots.slots if slots else 0,
            build={"backend": settings.backend, "engine": backend.info.engine},
        ),
        need=plan.memory.total if plan.memory is not None else 0,
        open_adapter=opener(plan, slots),
        embedding=embedding_of(plan.model, pooling),
    )


async def _serve(
    plan: ServePlan, backend: Backend, bound: socket.socket, key: bytes | None
) -> None:
    server = open_server(plan, backend, key)
    http = http_server(application(server), server.settings)
    info = backend.info
    limits = f"{info.slots} sequences of {info.max_length} tokens at a time"
    async with _running(server, plan):
        close = server.engine.close  # running requests get an error
        await serve_until_stopped(http, server, bound, server.name, close, limits)


def http_server(app: ASGIApp, settings: Serve, *, behind: bool = False) -> uvicorn.Server:
    """The server of an application; `behind`: it answers another process of ours."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # requests are logged by Guard
    return _Http(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            http=Connection,
            timeout_keep_alive=KEEP_ALIVE_S,
            forwarded_allow_ips="*" if behind else None,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
        )
    )


@asynccontextmanager
async def _running(server: Server, plan: ServePlan) -> AsyncIterator[None]:
    """Within, the engine runs, and so does the watch of a folder of adapters."""
    server.engine.start()
    watch = watch_of(server, plan)
    if watch is not None:
        await watch.start()
    sys.setswitchinterval(SWITCH_S)
    # Looking for garbage among what is loaded would hold up all requests, now and then.
    gc.collect()
    gc.freeze()
    gc.collect()  # it looks again once there is a quarter more than it found here: little now
    try:
        yield
    finally:
        if watch is not None:
            watch.close()
        await asyncio.to_thread(server.engine.close)


async def serve_until_stopped(
    http: uvicorn.Server,
    server: Endable,
    bound: socket.socket,
    named: str,
    close: Callable[[], None],
    limits: str = "each when it is asked for",
) -> None:
    """Serve until SIGTERM or Ctrl-C; `close` ends running requests."""
    gc.set_threshold(*_GARBAGE)
    with _Ending(http, server, close).on_signals():
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        progress.note(
            f"serving {named} on {server.settings.scheme}://{shown}:{port}"
            f" ({limits}; Ctrl-C ends it)"
        )
        await http.serve([bound])


def run_model(
    planned: Planned,
    raw: Mapping[str, Any],
    plugins: Sequence[str],
    key: bytes | None,
    path: str,
    kept: Path,
    pipe: Pipe,
) -> None:
    """Serve one of several models on the socket at `path` until the pipe is closed; `raw`: its
    config as plain data, `planned` makes the plan of it; `kept`: a file for its responses, while it
    is not loaded. It sends the memory that it needs through the pipe, waits for leave to load, and
    reports that it has loaded."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process ends it
        signal.signal(number, signal.SIG_IGN)
    try:
        register_plugins(plugins)
        bound_arenas(_ARENAS)
        plan = planned(raw)
        pipe.send({"bytes": plan.memory.total if plan.memory is not None else 0})
        pipe.recv()
        with closing(open_planned(plan)) as backend:
            backend.prepare()
            asyncio.run(_answer(plan, backend, key, path, kept, pipe))
    except EOFError:
        return
    except Exception as error:
        lacks = error if isinstance(error, RunnerError) else shortage_error(error)
        if lacks is None:
            logging.getLogger(__name__).error("a model was not loaded", exc_info=error)
            lacks = RunnerError(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            here = isinstance(lacks, EnvironmentFault)  # such as its memory
            pipe.send({"error": lacks.message, "hint": lacks.hint, "here": here})


async def _answer(
    plan: ServePlan, backend: Backend, key: bytes | None, path: str, kept: Path, pipe: Pipe
) -> None:
    server, loop = open_server(plan, backend, key), asyncio.get_running_loop()
    server.responses.load(kept)
    http = http_server(application(server), server.settings, behind=True)

    def stop() -> None:
        loop.remove_reader(pipe.fileno())
        http.should_exit = True

    async with _running(server, plan):
        with closing(socket.socket(socket.AF_UNIX)) as bound:
            bound.bind(path)
            bound.listen()
            loop.add_reader(pipe.fileno(), stop)
            names = (*server.names, *server.adapters)
            pipe.send({"names": names, "max_length": server.engine.info.max_length})
            await http.serve([bound])
    server.responses.save(kept)


class _Http(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are this process's own: see _stopping."""
        yield


class Endable(Protocol):
    """A server that can be stopped: of one model, or of several."""

    settings: Serve
    draining: bool


class _Ending:
    """The end of a server, in stages: a delay in which requests are still taken but /ready is 503,
    for a load balancer to notice; the time that running requests have; and what is left is cut,
    with an error. SIGTERM begins with the first, Ctrl-C with the second; another signal goes on to
    the next."""

    def __init__(self, http: uvicorn.Server, server: Endable, close: Callable[[], None]) -> None:
        """`close` ends running requests."""
        self._http, self._server, self._close = http, server, close
        self._loop = asyncio.get_running_loop()
        self._signal = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within, SIGTERM and Ctrl-C are this object's."""

        def take() -> bool:
            self._loop.call_soon_threadsafe(self._go_on, 0)
            return True

        before = signal.getsignal(signal.SIGTERM)
        delay = self._server.settings.drain_delay
        self._loop.add_signal_handler(signal.SIGTERM, self._go_on, delay)
        try:
            with offered(take):
                yield
        finally:
            if self._task is not None:
                self._task.cancel()
            self._loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)

    def _go_on(self, delay: float) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._end(delay))
        else:
            self._signal.set()

    async def _end(self, delay: float) -> None:
        self._server.draining = True
        if delay:
            _tell(f"shutting down: requests are accepted for {delay:g} s more; /ready is 503")
            await self._pause(delay)
        self._http.should_exit = True
        _tell("shutting down: running requests are completed; Ctrl-C again ends them")
        await self._pause(self._server.settings.drain_timeout)
        await asyncio.to_thread(self._close)
        await self._pause(_LAST_S)
        for connection in list(self._http.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._http.force_exit = True

    async def _pause(self, seconds: float) -> None:
        """Wait for the time to pass, or for a signal."""
        self._signal.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._signal.wait(), seconds)


def _tell(text: str) -> None:
    """A note; an error of standard error does not stop the shutdown."""
    with suppress(OSError):
        progress.note(text)
