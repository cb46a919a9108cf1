"""OpenTelemetry: a span of each request, and those of its queue, prefill and decode, by OTLP over
HTTP in JSON. The variables are everybody's; without OTEL_EXPORTER_OTLP_ENDPOINT nothing is sent."""

from __future__ import annotations

import atexit
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

from pydantic_core import to_json

from lite_runner import __version__, progress
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.serving.metrics import RequestStats

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
_MOST = 2048  # spans that wait to be sent; more are dropped
_BATCH, _EVERY_S, _TIMEOUT_S = 512, 1.0, 10.0
_INTERNAL, _SERVER, _FAILED = 1, 2, 2  # of a span's kind, and of its status


@dataclass(frozen=True)
class Trace:
    """The trace that a request is part of."""

    id: str
    parent: str  # the caller's span; "": none


def trace_of(header: str) -> Trace | None:
    """The trace that `traceparent` names, or a new one; None: the caller records none."""
    if (found := _PARENT.match(header)) is None:
        return Trace(secrets.token_hex(16), "")
    return Trace(found[1], found[2]) if int(found[3], 16) & 1 else None


def spans_of(
    trace: Trace,
    name: str,
    began: float,
    attributes: Mapping[str, str | int],
    stats: RequestStats | None,
) -> list[dict[str, Any]]:
    """The spans of a request that is over; `began`: by time.perf_counter."""
    now, at = time.perf_counter(), time.time_ns()
    own = secrets.token_hex(8)

    def span(
        name: str, kind: int, start: float, end: float, parent: str, **more: Any
    ) -> dict[str, Any]:
        return {
            "traceId": trace.id,
            "spanId": own if kind == _SERVER else secrets.token_hex(8),
            "parentSpanId": parent,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(at - round((now - start) * 1e9)),
            "endTimeUnixNano": str(at - round((now - end) * 1e9)),
            **more,
        }

    usage = {}
    if stats is not None:
        usage["gen_ai.usage.input_tokens"] = stats.usage.prompt
        usage["gen_ai.usage.output_tokens"] = stats.usage.completion
    described = [_attribute(*pair) for pair in {**attributes, **usage}.items()]
    status = {"code": _FAILED} if int(attributes["http.response.status_code"]) >= 500 else {}
    whole = span(name, _SERVER, began, now, trace.parent, attributes=described, status=status)
    parts = stats.phases() if stats is not None else ()
    return [whole, *(span(part, _INTERNAL, start, end, own) for part, start, end in parts)]


def _attribute(name: str, value: str | int) -> dict[str, Any]:
    kind = {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}
    return {"key": name, "value": kind}


class Exporter:
    """Sends spans in a thread of its own."""

    def __init__(self, address: str, headers: Mapping[str, str], service: str) -> None:
        self._address = address
        self._headers = {"Content-Type": "application/json", **headers}
        self._resource = {"attributes": [_attribute("service.name", service)]}
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST)
        self._failed = False  # the last time
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: list[dict[str, Any]]) -> None:
        """Send these soon; they are dropped where too many wait."""
        for span in spans:
            try:
                self._waiting.put_nowait(span)
            except queue.Full:
                return

    def close(self) -> None:
        """Send the waiting spans, and end."""
        self._waiting.put(None)
        self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        for batch in self._batches():
            scope = {"name": "lite_runner", "version": __version__}
            scoped = [{"scope": scope, "spans": batch}]
            body = {"resourceSpans": [{"resource": self._resource, "scopeSpans": scoped}]}
            self._send(to_json(body))

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        while (span := self._waiting.get()) is not None:
            batch, until = [span], time.monotonic() + _EVERY_S
            while len(batch) < _BATCH and (left := until - time.monotonic()) > 0:
                try:
                    more = self._waiting.get(timeout=left)
                except queue.Empty:
                    break
                if more is None:
                    yield batch
                    return
                batch.append(more)
            yield batch

    def _send(self, body: bytes) -> None:
        try:
            with urlopen(Request(self._address, body, self._headers), timeout=_TIMEOUT_S):
                pass
        except (OSError, ValueError) as error:
            if not self._failed:
                why = f"HTTP {error.code}" if isinstance(error, HTTPError) else str(error)
                progress.note(f"traces are not sent to {self._address}: {why}")
            self._failed = True
        else:
            self._failed = False


def exporter(environ: Mapping[str, str] = os.environ) -> Exporter | None:
    """The exporter that the environment asks for; None: it asks for none."""
    address = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if not address and (base := environ.get(_ENDPOINT, "")):
        address = f"{base.rstrip('/')}/v1/traces"
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or not address.startswith(("http://", "https://")):
        return None
    pairs = (one.partition("=") for one in environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip()}
    exporter = Exporter(address, headers, environ.get("OTEL_SERVICE_NAME") or "lite-runner")
    atexit.register(exporter.close)
    return exporter
