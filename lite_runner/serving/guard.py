"""Before and after every request: its id, the key, the log line."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from lite_runner import progress
from lite_runner.serving import static
from lite_runner.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lite_runner.serving.state import Server

OPEN = ("/health", "/ready", *static.FILES)  # without a key
_QUIET = (*OPEN, "/metrics")  # without a log line: they are asked for often
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["X-Request-Id"] = id
                answer["X-Content-Type-Options"] = "nosniff"
            await send(message)

        scope.setdefault("state", {})
        try:
            fault = self._fault(scope, headers)
            if fault is not None:
                self._server.metrics.refused(fault.status)
                response = JSONResponse(fault.body(), fault.status, headers=fault.headers)
                await response(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        finally:
            if scope["path"] not in _QUIET:
                self._log(scope, status, time.perf_counter() - began, id)

    def _fault(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Why a request is refused before it is read."""
        if not self._server.settings.is_public:
            # A page elsewhere may have its own name resolve to this machine (DNS rebinding).
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in (*_LOCAL, self._server.settings.host):
                return ApiError(400, f"Host: got {name[:100]!r}, expected {_LOCAL[0]}")
        key = self._server.key
        if key is None or scope["path"] in OPEN:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key):
            return None
        return ApiError(401, "Authorization: expected Bearer and the server's key")

    def _log(self, scope: Scope, status: int, seconds: float, id: str) -> None:
        """One line a request; 499: the client left before the answer began."""
        call: Any = scope["state"].get("progress")
        line = {
            "id": id,
            "client": (scope.get("client") or ("?",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status or 499,
            "seconds": round(seconds, 3),
        }
        if call is not None:
            usage = call.usage
            line |= {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
            line["cached_tokens"] = usage.cached
        if self._server.settings.log_format == "json":
            progress.note(json.dumps(line))
        else:
            progress.note(" ".join(f"{name}={value}" for name, value in line.items()))
