"""The HTTP application: its routes, and how a call becomes an answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lite_runner import __version__
from lite_runner.errors import RunnerError
from lite_runner.serving import adapters, static
from lite_runner.serving.chat import ChatCompletion
from lite_runner.serving.completions import Completions
from lite_runner.serving.engine import Busy, Stopped
from lite_runner.serving.errors import ApiError, of_exception, of_validation
from lite_runner.serving.guard import Guard
from lite_runner.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapter,
    TokenizeRequest,
    UnloadAdapter,
)
from lite_runner.serving.state import Gone, Server, or_gone
from lite_runner.serving.tools import plain_messages

logger = logging.getLogger(__name__)
MAX_BODY = 8 << 20  # bytes
Body = TypeVar("Body", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]


def application(server: Server) -> Guard:
    """The ASGI application of a server."""
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
            *static.routes(),
        ],
        exception_handlers={
            Gone: left,
            ApiError: refused,
            Busy: refused,
            Stopped: refused,
            TimeoutError: refused,
            RunnerError: refused,
            HTTPException: refused,
            Exception: refused,
        },
    )
    app.state.server = server
    return Guard(app, server)


async def completions(request: Request) -> Response:
    body = await body_of(request, CompletionRequest)
    return await answered(request, Completions(server_of(request), body), stream=bool(body.stream))


async def chat_completions(request: Request) -> Response:
    body = await body_of(request, ChatRequest)
    call = ChatCompletion(server_of(request), body)
    return await answered(request, call, stream=bool(body.stream))


async def answered(
    request: Request, call: Completions | ChatCompletion, *, stream: bool
) -> Response:
    """The answer of a call, whole or in server-sent events. A client that leaves ends it."""
    await call.prepare()
    request.state.progress = call.progress
    if not stream:
        return JSONResponse(await or_gone(call.whole(), disconnected(request)))
    chunks = call.chunks()
    # Before the status is sent: what cannot be done shows with the first output.
    first = await or_gone(anext(chunks), disconnected(request))
    return StreamingResponse(
        events(first, chunks),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def events(
    first: Any, chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[str, None]:
    """Chunks as server-sent events; an error on the way is the last one."""
    try:
        yield event(first)
        async for chunk in chunks:
            yield event(chunk)
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield event(api_error(error).body())
    finally:
        await chunks.aclose()


def event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def models(request: Request) -> Response:
    server = server_of(request)
    listed = [card(server, name) for name in (server.name, *server.adapters)]
    return JSONResponse({"object": "list", "data": listed})


async def model(request: Request) -> Response:
    server, name = server_of(request), request.path_params["name"]
    server.adapter_of(name)
    return JSONResponse(card(server, name))


def card(server: Server, name: str) -> dict[str, Any]:
    """A model as /v1/models lists it: an adapter's parent is the base."""
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "lite-runner",
        "root": name,
        "parent": None if name == server.name else server.name,
        "max_model_len": server.engine.info.max_length,
    }


async def load_adapter(request: Request) -> Response:
    body = await body_of(request, LoadAdapter)
    return PlainTextResponse(await adapters.load(server_of(request), body))


async def unload_adapter(request: Request) -> Response:
    body = await body_of(request, UnloadAdapter)
    return PlainTextResponse(await adapters.unload(server_of(request), body))


async def tokenize(request: Request) -> Response:
    body, server = await body_of(request, TokenizeRequest), server_of(request)
    server.adapter_of(body.model)
    tokenizer = server.tokenizer
    if body.messages is not None:
        messages = plain_messages(body.messages, tokenizer)
        generates = body.add_generation_prompt is not False
        ids = await server.encode_chat(messages, generates, None)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        ids = await server.encode(lambda: tokenizer.encode(text, special))
    return JSONResponse(
        {"count": len(ids), "max_model_len": server.engine.info.max_length, "tokens": ids}
    )


async def detokenize(request: Request) -> Response:
    body, server = await body_of(request, DetokenizeRequest), server_of(request)
    server.adapter_of(body.model)
    text = server.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


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


async def left(_: Request, __: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=499)


async def refused(request: Request, error: Exception) -> Response:
    """An error as OpenAI's protocol has it."""
    found = api_error(error)
    server_of(request).metrics.refused(found.status)
    return JSONResponse(found.body(), found.status, headers=found.headers)


def api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # no such path, or method
        return ApiError(error.status_code, error.detail)
    if not isinstance(error, (Busy, Stopped, TimeoutError, RunnerError)):
        logger.error("a request failed", exc_info=error)
    return of_exception(error)


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The body of a request, within MAX_BODY bytes. Raises ApiError."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "Content-Type: expected application/json")
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY} bytes")
    try:
        return kind.model_validate_json(bytes(parts))
    except ValidationError as error:
        raise of_validation(error) from None


async def disconnected(request: Request) -> None:
    """Return once the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
