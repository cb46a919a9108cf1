"""Loading and unloading adapters while a server runs: by clients, or from a watched folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.errors import ArtifactError, ConfigError, RunnerError
from lite_runner.model.adapters import (
    AdapterFiles,
    adapter_files,
    adapter_root_of,
    in_memory,
    open_later,
)
from lite_runner.serving.engine import Stopped
from lite_runner.serving.errors import ApiError, client_message, shortened
from lite_runner.serving.options import ServePlan
from lite_runner.serving.schemas import LoadAdapter, UnloadAdapter
from lite_runner.serving.state import OpenAdapter, Server
from lite_runner.system.memory import check_memory

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots

LOOK_S = 0.02  # interval of checks whether an adapter is still in use
POLL_S = 1.0  # interval of checks of a watched folder
MOST_WATCHED = 1000  # adapters in it


def opener(plan: ServePlan, slots: AdapterSlots | None) -> OpenAdapter | None:
    """Opens the adapters that clients load; None where they may not."""
    source = plan.settings.source.adapters
    if slots is None or source is None or not plan.serve.load_adapters:
        return None
    root = adapter_root_of(source)
    assert root is not None

    def open_adapter(name: str, folder: str) -> Callable[[], None]:
        adapter = open_later(source, plan.model, name, folder, root)
        return lambda: slots.add(adapter)

    return open_adapter


async def load_lora(server: Server, body: LoadAdapter) -> str:
    """Raises ApiError for an adapter outside adapter_root, one that is broken or does not fit."""
    name, open_adapter = body.lora_name, _allowed(server)
    if _is_taken(server, name):
        raise ApiError(400, f"lora_name: there is a model {name} already", "lora_name")
    try:
        await _add(server, name, lambda: open_adapter(name, body.lora_path))
    except (ArtifactError, ConfigError) as error:
        raise ApiError(400, f"lora_path: {client_message(error)}", "lora_path") from None
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload_lora(server: Server, body: UnloadAdapter) -> str:
    """No new request gets the adapter from now on; it is unloaded once the requests with it are
    finished. Raises ApiError for an unknown one."""
    _allowed(server)
    name = body.lora_name
    if name not in server.adapters:
        raise ApiError(
            404, f"lora_name: no adapter {shortened(name, 100)!r}", "lora_name", "model_not_found"
        )
    await _remove(server, name)
    return f"Success: LoRA adapter '{name}' removed successfully."


def _allowed(server: Server) -> OpenAdapter:
    if server.open_adapter is None:
        raise ApiError(403, "adapters stay as they are: see serve.load_adapters")
    return server.open_adapter


def _is_taken(server: Server, name: str) -> bool:
    return name in (*server.names, *server.adapters, *server.changing_adapters)


async def _add(server: Server, name: str, open_adapter: Callable[[], Callable[[], None]]) -> None:
    """Open an adapter in another thread, and register it. Raises RunnerError."""
    server.changing_adapters.add(name)
    try:
        register = await server.aside(open_adapter)
        await asyncio.wrap_future(server.engine.between_steps(register))
        server.adapters = (*server.adapters, name)
    finally:
        server.changing_adapters.discard(name)


async def _remove(server: Server, name: str) -> None:
    """Unregister an adapter once the requests with it are finished."""
    slots = server.engine.adapters
    assert slots is not None
    server.adapters = tuple(one for one in server.adapters if one != name)
    server.changing_adapters.add(name)
    try:
        while True:
            while server.adapter_uses[name]:
                await asyncio.sleep(LOOK_S)
            try:
                removed = server.engine.between_steps(lambda: slots.remove(name))
                await asyncio.wrap_future(removed)
                break
            except ConfigError:  # one that was cancelled holds it until the next step
                await asyncio.sleep(LOOK_S)
    finally:
        server.changing_adapters.discard(name)


def watch_of(server: Server, plan: ServePlan) -> FolderWatch | None:
    """The watch of serve.watch_adapters; None: nothing is watched."""
    slots, source = server.engine.adapters, plan.settings.source.adapters
    if not plan.serve.watch_adapters or slots is None or source is None:
        return None
    root = Path(plan.serve.watch_adapters).expanduser()

    def read(name: str) -> Callable[[], None]:
        adapter = open_later(source, plan.model, name, name, root)
        slots.check(adapter)
        adapter = in_memory(adapter)  # the files may be written again
        return lambda: slots.add(adapter)

    return FolderWatch(server, root, read)


class FolderWatch:
    """Loads the adapters of a folder as they come, and unloads them as they go.

    Each is a folder in it, whose name is the model's. One that is being written is left alone
    until two polls find the same files; one that cannot be loaded is reported once, and tried
    again when its files change.
    """

    def __init__(
        self, server: Server, root: Path, read: Callable[[str], Callable[[], None]]
    ) -> None:
        """`read`: opens the adapter of a folder's name, with its values, and returns what registers
        it. Raises RunnerError."""
        self._server, self._root, self._read = server, root, read
        self._known: dict[str, AdapterFiles] = {}  # as they were loaded, or could not be
        self._seen: dict[str, AdapterFiles] = {}  # at the last poll
        self._loaded: set[str] = set()  # by this
        self.changing: dict[str, asyncio.Task[None]] = {}  # tasks started by the last poll
        self._polling: asyncio.Task[None] | None = None
        self._noted = ""  # of the folder itself

    async def start(self) -> None:
        """Load the adapters there, and poll for changes."""
        self._seen = await self._server.aside(self._found)
        await self.poll()
        await asyncio.gather(*self.changing.values())
        self._polling = asyncio.create_task(self._poll())

    def close(self) -> None:
        """Stop polling."""
        for task in (self._polling, *self.changing.values()):
            if task is not None:
                task.cancel()

    async def poll(self) -> None:
        """Begin to load and unload changed adapters."""
        try:
            found = await self._server.aside(self._found)
        except OSError as error:  # loaded adapters stay
            self._tell(f"serve.watch_adapters={self._root}: {error.strerror or error}")
            return
        before, self._seen, server = self._seen, found, self._server
        for name in sorted(found.keys() | self._known.keys()):
            files = found.get(name)
            if name in self.changing or files == self._known.get(name):
                continue
            if files is None or files == before.get(name):
                task = asyncio.create_task(self._change(name, files))
                self.changing[name] = task
                task.add_done_callback(partial(self._changed, name))
        self._loaded &= {*server.adapters, *server.changing_adapters}  # clients may unload some

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.poll()

    def _changed(self, name: str, task: asyncio.Task[None]) -> None:
        del self.changing[name]

    async def _change(self, name: str, files: AdapterFiles | None) -> None:
        """Load an adapter with these files in place of the former one; None: unload it."""
        server = self._server
        if files is None:
            del self._known[name]
        else:
            self._known[name] = files
        with suppress(Stopped):
            try:
                if files is None:
                    if name in self._loaded:
                        await _remove(server, name)
                        progress.note(f"adapter {name}: unloaded")
                    return
                if name not in self._loaded and _is_taken(server, name):
                    raise ConfigError(
                        f"there is a model {name} already", "give the folder another name"
                    )
                if name in self._loaded:  # the old one stays if the new one is broken
                    register = await server.aside(partial(self._open, name, files))
                    await _remove(server, name)
                    await _add(server, name, lambda: register)
                else:
                    await _add(server, name, partial(self._open, name, files))
                self._loaded.add(name)
                progress.note(f"adapter {name}: loaded from {self._root / name}")
            except RunnerError as error:
                if adapter_files(self._root / name) != files:  # it was read while it was written
                    self._known.pop(name, None)
                    return
                progress.note(f"adapter {name}: not loaded: {error}")
            except MemoryError:
                progress.note(f"adapter {name}: not loaded: not enough memory")

    def _open(self, name: str, files: AdapterFiles) -> Callable[[], None]:
        """Read an adapter; returns the function that registers it. Raises RunnerError,
        MemoryError."""
        check_memory(sum(size for _, _, size, _ in files), self._server.memory_left())
        register = self._read(name)
        if adapter_files(self._root / name) != files:
            raise ArtifactError(f"{self._root / name}: changed while it was read")
        return register

    def _found(self) -> dict[str, AdapterFiles]:
        """The folders with all files of an adapter. Raises OSError."""
        names = sorted(one.name for one in self._root.iterdir() if one.name[0] != ".")
        if len(names) > MOST_WATCHED:
            self._tell(
                f"serve.watch_adapters={self._root}: has {len(names):,} entries, of which the"
                f" first {MOST_WATCHED:,} are read"
            )
        listed = ((name, adapter_files(self._root / name)) for name in names[:MOST_WATCHED])
        return {name: files for name, files in listed if files is not None}

    def _tell(self, text: str) -> None:
        if text != self._noted:
            self._noted = text
            progress.note(text)
