"""Spans of requests, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

import pytest

from lite_runner.serving.tracing import Exporter, Trace, exporter, trace_of
from tests.serving.conftest import Start
from tests.serving.test_app import call

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An HTTP server that keeps its requests."""

    def __init__(self) -> None:
        self.got: Queue[tuple[str, Any, Any]] = Queue()
        self.status, got = 200, self.got
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                got.put((self.path, self.headers, json.loads(body)))

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def spans(self) -> list[dict[str, Any]]:
        """Those of the next request."""
        (resource,) = self.got.get()[2]["resourceSpans"]
        (scope,) = resource["scopeSpans"]
        spans: list[dict[str, Any]] = scope["spans"]
        return spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    opened = Collector()
    yield opened
    opened.http.shutdown()
    opened.http.server_close()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def test_the_spans_of_a_request(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b, x-other=c")
    served = start()
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    parent = f"00-{TRACE}-{PARENT}-01"
    assert call(served, "/health")[0] == 200  # is none
    assert call(served, "/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-00")[0] == 200
    assert call(served, "/v1/completions", body, traceparent=parent)[0] == 200
    path, headers, sent = collector.got.get()
    assert path == "/v1/traces" and (headers["x-team"], headers["x-other"]) == ("a b", "c")
    (resource,) = sent["resourceSpans"]
    assert attributes(resource["resource"]) == {"service.name": "mine"}
    whole, *parts = resource["scopeSpans"][0]["spans"]
    assert (whole["traceId"], whole["parentSpanId"]) == (TRACE, PARENT) and whole["kind"] == 2
    assert whole["name"] == "POST /v1/completions"
    assert attributes(whole) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": "200",
        "gen_ai.usage.input_tokens": "5",
        "gen_ai.usage.output_tokens": "3",
    }
    assert [part["name"] for part in parts] == ["queue", "prefill", "decode"]
    assert {part["parentSpanId"] for part in parts} == {whole["spanId"]}
    assert {part["traceId"] for part in parts} == {TRACE}
    times = [int(one[f"{end}TimeUnixNano"]) for one in parts for end in ("start", "end")]
    assert times == sorted(times)
    assert int(whole["startTimeUnixNano"]) <= times[0] and times[-1] <= int(
        whole["endTimeUnixNano"]
    )


def test_a_failing_collector_is_reported_once(
    collector: Collector, capfd: pytest.CaptureFixture[str]
) -> None:
    collector.status = 500
    exporter = Exporter(f"{collector.url}/v1/traces", {}, "x")
    for _ in range(2):
        exporter.put([{"name": "one"}])
        assert collector.spans() == [{"name": "one"}]
    exporter.close()
    assert capfd.readouterr().err.count("traces are not sent") == 1


def test_the_context_of_a_trace() -> None:
    assert trace_of(f"00-{TRACE}-{PARENT}-01") == Trace(TRACE, PARENT)
    assert trace_of(f"01-{TRACE}-{PARENT}-01-more") == Trace(TRACE, PARENT)
    assert trace_of(f"00-{TRACE}-{PARENT}-00") is None
    for header in ("", "00-1-2-01", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"):
        trace = trace_of(header)
        assert trace is not None and trace.parent == "" and trace.id not in (TRACE, "0" * 32)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_is_sent_unless_it_is_asked_for(environ: dict[str, str]) -> None:
    assert exporter(environ) is None
