"""The HTTP application: routes and request handlers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from lite_runner import __version__, profiler
from lite_runner.errors import RunnerError
from lite_runner.profile import trace
from lite_runner.serving import static
from lite_runner.serving.adapters import load_lora, unload_lora
from lite_runner.serving.chat import ChatCompletion
from lite_runner.serving.completions import Completions
from lite_runner.serving.embeddings import (
    EmbeddingCall,
    EmbeddingRequest,
    RerankCall,
    RerankRequest,
)
from lite_runner.serving.engine import Busy, Stopped
from lite_runner.serving.errors import OUT_OF_MEMORY, ApiError, of_exception, shortened
from lite_runner.serving.messages import CountTokens, MessagesCall, MessagesRequest, count_tokens
from lite_runner.serving.middleware import Body, Guard, Guarded, parse_body
from lite_runner.serving.responses import ResponsesCall, ResponsesRequest, listed_items
from lite_runner.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapter,
    TokenizeRequest,
    UnloadAdapter,
)
from lite_runner.serving.state import Gone, Server, cancel_on_disconnect
from lite_runner.serving.thinking import checked_kwargs
from lite_runner.serving.tools import definitions
from lite_runner.system.memory import return_freed

logger = logging.getLogger(__name__)
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


def routed(server: Server) -> Starlette:
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", message_tokens, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/input_tokens", response_tokens, methods=["POST"]),
            Route("/v1/responses/{id}", response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/input_items", response_items),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/rerank", rerank, methods=["POST"]),
            Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", health),
            Route("/live", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/start_profile", start_profile, methods=["POST"]),
            Route("/stop_profile", stop_profile, methods=["POST"]),
            *static.routes(),
        ],
        exception_handlers=HANDLERS,
    )
    app.state.server = server
    return app


def application(server: Server) -> ASGIApp:
    return guarded(routed(server), server)


def guarded(app: ASGIApp, server: Guarded) -> ASGIApp:
    """The routes of a server behind its middleware."""
    behind = Guard(app, server)
    if not server.settings.cors_origins:
        return behind
    # Outside: a browser asks without a key first, and reads refusals, too.
    return CORSMiddleware(
        behind,
        allow_origins=server.settings.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


async def completions(request: Request) -> Response:
    make = partial(Completions, server_of(request))
    return await answered(request, await from_body(request, CompletionRequest, make))


async def chat_completions(request: Request) -> Response:
    make = partial(ChatCompletion, server_of(request))
    return await answered(request, await from_body(request, ChatRequest, make))


async def messages(request: Request) -> Response:
    make = partial(MessagesCall, server_of(request))
    return await answered(request, await from_body(request, MessagesRequest, make))


async def message_tokens(request: Request) -> Response:
    body = await body_of(request, CountTokens)
    return JSONResponse(await count_tokens(server_of(request), body))


async def responses(request: Request) -> Response:
    make = partial(ResponsesCall, server_of(request), owner=key_of(request))
    return await answered(request, await from_body(request, ResponsesRequest, make))


async def response_tokens(request: Request) -> Response:
    make = partial(ResponsesCall, server_of(request), owner=key_of(request))
    call = await from_body(request, ResponsesRequest, make)
    return JSONResponse(await call.count())


async def response(request: Request) -> Response:
    kept, id, key = server_of(request).responses, request.path_params["id"], key_of(request)
    if request.method == "DELETE":
        kept.remove(id, key)
        return JSONResponse({"id": id, "object": "response", "deleted": True})
    return Response(kept.get(id, key).response, media_type="application/json")


async def response_items(request: Request) -> Response:
    server = server_of(request)
    items = server.responses.get(request.path_params["id"], key_of(request)).items
    return await server.aside(lambda: Json(listed_items(items)))


async def embeddings(request: Request) -> Response:
    call = await from_body(request, EmbeddingRequest, partial(EmbeddingCall, server_of(request)))
    await written(request)
    request.state.stats = call.stats
    await cancel_on_disconnect(call.compute(), disconnected(request))
    return StreamingResponse(call.parts(), media_type="application/json")


async def rerank(request: Request) -> Response:
    call = await from_body(request, RerankRequest, partial(RerankCall, server_of(request)))
    await written(request)
    request.state.stats = call.stats
    return JSONResponse(await cancel_on_disconnect(call.whole(), disconnected(request)))


Call = Completions | ChatCompletion | MessagesCall | ResponsesCall


async def answered(request: Request, call: Call) -> Response:
    """The answer of a call, whole or in server-sent events. A client that leaves ends it."""
    await call.prepare()
    await written(request, call.replayed)
    request.state.stats = call.stats
    if not call.streams:
        whole = await cancel_on_disconnect(call.whole(), disconnected(request))
        return await server_of(request).aside_if(call.is_large, lambda: Json(whole))
    chunks = call.chunks()
    # Before the status is sent: errors show with the first output.
    chunk = await cancel_on_disconnect(anext(chunks), disconnected(request))
    first = await server_of(request).aside_if(call.is_large, lambda: event(chunk))
    return StreamingResponse(
        events(request, first, chunks, call.failed),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def events(
    request: Request,
    first: bytes,
    chunks: AsyncGenerator[dict[str, Any], None],
    failed: Callable[[ApiError], dict[str, Any]],
) -> AsyncGenerator[bytes, None]:
    """`first` and the chunks after it as server-sent events; an error ends them."""
    request.state.cut = "disconnected"  # unless it goes on
    try:
        yield first
        async for chunk in chunks:
            yield event(chunk)
        if not first.startswith(b"event"):  # those with names have one for the end
            yield b"data: [DONE]\n\n"
        request.state.cut = None
    except Exception as error:
        found = api_error(error)
        request.state.cut = found.code or found.kind
        yield event(failed(found))
    finally:
        await chunks.aclose()


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event, named by its type where it has one."""
    name = b"event: %b\n" % content["type"].encode() if "type" in content else b""
    return b"%bdata: %b\n\n" % (name, to_json(content))


class Json(JSONResponse):
    """Serialized three times as fast: log-probabilities may be megabytes, and other requests
    wait."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


async def models(request: Request) -> Response:
    server = server_of(request)
    return models_response(
        request, [card(server, one) for one in (*server.names, *server.adapters)]
    )


async def model(request: Request) -> Response:
    server, name = server_of(request), request.path_params["name"]
    server.adapter_of(name)
    return model_response(request, card(server, name))


def models_response(request: Request, cards: Sequence[dict[str, Any]]) -> Response:
    """/v1/models in the protocol of the client."""
    if "anthropic-version" not in request.headers:
        return JSONResponse({"object": "list", "data": cards})
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return JSONResponse({"data": list(map(_anthropics, cards)), **ends})


def model_response(request: Request, card: dict[str, Any]) -> Response:
    """/v1/models/NAME in the protocol of the client."""
    return JSONResponse(_anthropics(card) if "anthropic-version" in request.headers else card)


def _anthropics(card: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], timezone.utc).isoformat()
    name, most = card["id"], card["max_model_len"]
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "max_input_tokens": most,
        "max_tokens": most,
    }


def card(server: Server, name: str) -> dict[str, Any]:
    """A model as /v1/models lists it: an adapter's parent is the base."""
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "lite-runner",
        "root": name,
        "parent": None if name in server.names else server.name,
        "max_model_len": server.engine.info.max_length,
    }


async def load_adapter(request: Request) -> Response:
    body = await body_of(request, LoadAdapter)
    return PlainTextResponse(await load_lora(server_of(request), body))


async def unload_adapter(request: Request) -> Response:
    body = await body_of(request, UnloadAdapter)
    return PlainTextResponse(await unload_lora(server_of(request), body))


async def tokenize(request: Request) -> Response:
    body, server = await body_of(request, TokenizeRequest), server_of(request)
    server.adapter_of(body.model)
    if body.messages is not None:
        generates = body.add_generation_prompt is not False
        kwargs = checked_kwargs(body.chat_template_kwargs, server.tokenizer)
        tools = definitions(body.tools, server.call_format) if body.tools else None
        ids = await server.encode_chat(body.messages, generates, tools, kwargs)
    else:
        ids = await server.encode(body.prompt or "", body.add_special_tokens is not False)
    found = {"count": len(ids), "max_model_len": server.engine.info.max_length, "tokens": ids}
    return await server.aside(lambda: Json(found))


async def detokenize(request: Request) -> Response:
    body, server = await body_of(request, DetokenizeRequest), server_of(request)
    server.adapter_of(body.model)
    if len(body.tokens) > (most := server.engine.info.max_length):
        raise ApiError(400, f"tokens: {len(body.tokens)}, at most {most} at a time", "tokens")

    def answer() -> Response:
        text = server.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return Json({"prompt": text})

    return await server.aside(answer)


async def health(request: Request) -> Response:
    """200 while the engine runs."""
    failed = server_of(request).engine.failure is not None
    return Response(status_code=503 if failed else 200)


async def ready(request: Request) -> Response:
    """200 while requests are taken: not while the server drains."""
    server = server_of(request)
    closed = server.draining or server.engine.failure is not None
    return Response(status_code=503 if closed else 200)


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


async def version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


async def start_profile(_: Request) -> Response:
    """Record from now on, as vLLM does; drops earlier records."""
    _traces()
    profiler.start()
    return Response()


async def stop_profile(_: Request) -> Response:
    """The tables of the recorded profile; its trace goes to the run folder."""
    folder = _traces()
    if (recorder := profiler.stop()) is None:
        raise ApiError(400, "no profile is running: POST /start_profile first")
    process = recorder.process("run")
    names = (folder / f"trace-{number}.json" for number in itertools.count(1))
    path = next(name for name in names if not name.exists())
    await asyncio.to_thread(lambda: path.write_text(trace([process]), encoding="utf-8"))
    return JSONResponse({**process.profile.to_json(), "trace": path.name})


def _traces() -> Path:
    """The folder of traces. Raises ApiError where there is none."""
    if profiler.folder is None:
        raise ApiError(404, "profiling needs a server started with profile=true")
    return profiler.folder


async def client_closed_request(_: Request, __: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=499)


async def refused(request: Request, error: Exception) -> Response:
    """An error in the protocol's form."""
    found, server = api_error(error), request.app.state.server
    if isinstance(error, HTTPException):
        found.message = _misaddressed(request, found.status)
    server.metrics.refused(found.status)
    await written(request)
    return JSONResponse(found.body(request.url.path), found.status, headers=found.headers)


def _misaddressed(request: Request, status: int) -> str:
    """The error message for an unknown path, or a method that the path does not take."""
    paths = [route.path for route in request.app.routes]
    path, shown = request.url.path, shortened(request.url.path, 100)
    if status == 405:
        return f"{shown} does not take {request.method}"
    known = next((one for one in (f"/v1{path}", path.removeprefix("/v1")) if one in paths), None)
    return f"there is no {shown} here" + (f"; there is {known}" if known else "")


HANDLERS = {
    Gone: client_closed_request,
    ClientDisconnect: client_closed_request,  # before the end of its body
    ApiError: refused,
    Busy: refused,
    Stopped: refused,
    TimeoutError: refused,
    MemoryError: refused,
    RunnerError: refused,
    HTTPException: refused,
    Exception: refused,
}


def api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # no such path, or method
        return ApiError(error.status_code, error.detail)
    found = of_exception(error)
    if found.status == 500 and not isinstance(error, RunnerError):
        logger.error("a request failed", exc_info=error)
    elif found is OUT_OF_MEMORY:
        return_freed()
    return found


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def key_of(request: Request) -> str | None:
    """The name of the key that a request has; None: the server has none."""
    name: str | None = request.scope["state"].get("key")
    return name


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The body of a request. Raises ApiError."""
    return await from_body(request, kind, lambda body: body)


async def from_body(request: Request, kind: type[Body], make: Callable[[Body], T]) -> T:
    """The result of `make` for the validated body of a request. Raises ApiError."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "Content-Type: expected application/json")
    server = server_of(request)

    def read(data: bytearray) -> T:
        if server.settings.request_log:
            request.state.body = bytes(data)
        return make(parse_body(data, kind))

    return await server.read(request.stream(), read)


async def written(request: Request, replayed: Callable[[Any], Any] = lambda body: body) -> None:
    """Write a request to the log of requests, if there is one and it is not there yet;
    `replayed`: the body that gives the same answer again."""
    state = request.scope["state"]
    if (body := state.pop("body", None)) is not None:
        await server_of(request).log_request(
            state["id"], request.url.path, lambda: replayed(from_json(body))
        )


async def disconnected(request: Request) -> None:
    """Return once the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
