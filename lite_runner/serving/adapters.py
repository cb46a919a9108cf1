"""Adapters that come and go while the server runs, with vLLM's two endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lite_runner.backends.base import AdapterSlots
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.later_adapter import open_later
from lite_runner.plan.plan import Plan
from lite_runner.serving.errors import ApiError
from lite_runner.serving.options import ServeOptions
from lite_runner.serving.schemas import LoadAdapter, UnloadAdapter
from lite_runner.serving.state import OpenAdapter, Server

_LOOK_S = 0.02  # how often an adapter that is to go is looked at


def opener(plan: Plan, slots: AdapterSlots | None) -> OpenAdapter | None:
    """Opens the adapters that clients load; None where they may not."""
    config = plan.config
    assert isinstance(config, ServeOptions)
    if slots is None or not config.serve.load_adapters:
        return None

    def open_adapter(name: str, folder: str) -> Callable[[], None]:
        adapter = open_later(config, plan.model, name, folder)
        return lambda: slots.add(adapter)

    return open_adapter


async def load(server: Server, body: LoadAdapter) -> str:
    """Raises ApiError for an adapter outside adapter_root, one that is broken or does not fit."""
    name, open_adapter = body.lora_name, _allowed(server)
    if name in (server.name, *server.adapters, *server.changing_adapters):
        raise ApiError(400, f"lora_name: there is a model {name} already", "lora_name")
    server.changing_adapters.add(name)
    try:
        register = await server.aside(lambda: open_adapter(name, body.lora_path))
        await asyncio.wrap_future(server.engine.between_steps(register))
        server.adapters = (*server.adapters, name)
    except (ArtifactError, ConfigError) as error:
        raise ApiError(400, f"lora_path: {error.message}", "lora_path") from None
    finally:
        server.changing_adapters.discard(name)
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload(server: Server, body: UnloadAdapter) -> str:
    """No new request gets the adapter from now on; it goes once those that have it are over.
    Raises ApiError for an unknown one."""
    _allowed(server)
    name, slots = body.lora_name, server.engine.adapters
    assert slots is not None
    if name not in server.adapters:
        raise ApiError(404, f"lora_name: no adapter {name!r}", "lora_name", "model_not_found")
    server.adapters = tuple(one for one in server.adapters if one != name)
    server.changing_adapters.add(name)
    try:
        while True:
            while server.adapter_uses[name]:
                await asyncio.sleep(_LOOK_S)
            try:
                removed = server.engine.between_steps(lambda: slots.remove(name))
                await asyncio.wrap_future(removed)
                break
            except ConfigError:  # one that was cancelled holds it until the next step
                await asyncio.sleep(_LOOK_S)
    finally:
        server.changing_adapters.discard(name)
    return f"Success: LoRA adapter '{name}' removed successfully."


def _allowed(server: Server) -> OpenAdapter:
    if server.open_adapter is None:
        raise ApiError(403, "adapters stay as they are: see serve.load_adapters")
    return server.open_adapter
