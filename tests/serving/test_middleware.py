"""Idle connections do not block others."""

from __future__ import annotations

import json
import random
import socket
import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from pydantic import ValidationError
from uvicorn.protocols.http.h11_impl import H11Protocol

from lite_runner.serving import middleware
from lite_runner.serving.errors import ApiError, of_validation
from lite_runner.serving.middleware import MAX_BODY, MAX_VALUES, check_values, parse_body
from lite_runner.serving.schemas import CompletionRequest
from lite_runner.text.tokenizer import Tokenizer, TooManyTokens, byte_tokenizer
from tests.serving.conftest import Served, Start
from tests.serving.test_app import call

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PING = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def rest(connection: socket.socket) -> bytes:
    """The bytes until the server closes the connection."""
    found = b""
    try:
        while part := connection.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", HEAD, PING + b"GET /hea"])
def test_half_a_head_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(middleware, "HEAD_S", 0.05)
    served = start()
    with connect(served) as connection:
        connection.sendall(sent)
        assert rest(connection).startswith(b"HTTP/1.1 200" if PING in sent else b"")
    assert call(served, "/health")[0] == 200


def test_half_a_body_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_S", 0.05)
    with connect(start()) as connection:
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt":')
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
    assert "was not received within" in json.loads(body)["error"]["message"]


def test_an_unread_body_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it when it comes byte by byte."""
    monkeypatch.setattr(middleware, "BODY_S", 0.0)
    monkeypatch.setattr(middleware, "_ANSWER_S", 0.3)
    with connect(start(key=b"secret")) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
        connection.settimeout(0.02)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(500):
                connection.sendall(b" ")
                with suppress(TimeoutError):
                    connection.recv(4096)


@pytest.mark.parametrize("sent", [b"GET /he", HEAD + b"Content-Length: 4000000\r\n\r\n"])
def test_without_memory_a_connection_is_answered_not_reset(
    start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """The rest of the client's body is read: the answer would be lost otherwise."""
    served, lacks, whole = start(), [True], H11Protocol.data_received

    def received(self: H11Protocol, data: bytes) -> None:
        if lacks[0] and b"x" in data:
            raise MemoryError
        whole(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", received)
    with connect(served) as connection:
        connection.sendall(sent)
        connection.sendall(b"x" * 3_000_000)
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and b"Retry-After" in head
    assert json.loads(body)["error"]["message"] == "out of memory"
    lacks[0] = False
    assert call(served, "/v1/completions", {"prompt": "xx", "max_tokens": 1})[0] == 200


def test_idle_connections_make_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks next is answered, on a new connection and on one that works."""
    monkeypatch.setattr(middleware, "most_connections", lambda: 8)
    served = start()
    with ExitStack() as open:
        for _ in range(40):
            open.enter_context(connect(served))
        assert call(served, "/health")[0] == 200
        status, _, content = call(served, "/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert status == 200, content


def filled(head: str, item: str, tail: str, count: int | None = None) -> bytes:
    """A body of `count` items, or of as many as it may have."""
    count = count or (MAX_BODY - len(head) - len(tail)) // len(item)
    return (head + item * count).rstrip(",").encode() + tail.encode()


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE, TEXT = '{"role":"user","content":"x"},', '{"messages":[{"role":"user","content":"'
KEYS = "{" + ",".join(f'"k{number}":1' for number in range(100_000)) + "}"
BIAS = ",".join(f'"{number}":true' for number in range(100_000))
LARGE = (
    # More values than are parsed.
    (COMPLETION, filled('{"prompt":[', "{},", "]}"), 413),
    (COMPLETION, filled('{"prompt":"a","stop_token_ids":[', "1,", "]}"), 413),
    (COMPLETION, filled('{"prompt":[', "0.5,", "]}", 1_000_000), 413),
    (COMPLETION, filled("{", '"k":1,', "}"), 413),
    (CHAT, filled('{"messages":[', MESSAGE, "]}", 200_000), 413),
    ("/detokenize", filled('{"tokens":[', "1,", "]}"), 413),
    # As many as may be.
    (COMPLETION, filled('{"prompt":[', "{},", "]}", 120_000), 400),
    (COMPLETION, filled('{"prompt":[[', "-1,", "]]}", 250_000), 400),
    (COMPLETION, filled('{"prompt":"a","stop_token_ids":[', "1,", "]}", 250_000), 400),
    (COMPLETION, filled('{"prompt":"a","guided_choice":[', "1,", "]}", 250_000), 400),
    (COMPLETION, KEYS.encode(), 400),
    (COMPLETION, ('{"prompt":"a","logit_bias":{' + BIAS + "}}").encode(), 400),
    (CHAT, filled('{"messages":[', "{},", "]}", 120_000), 400),
    (CHAT, filled('{"messages":[', MESSAGE, "]}", 50_000), 400),
    (CHAT, filled('{"messages":[{"role":"user","content":[', "{},", "]}]}", 120_000), 400),
    (CHAT, filled('{"messages":[' + MESSAGE[:-1] + '],"tools":[', "{},", "]}", 20_000), 400),
    ("/detokenize", filled('{"tokens":[', "1,", "]}", 257), 400),
    # Texts far beyond the context.
    (COMPLETION, filled('{"prompt":"', "a ", '"}'), 400),
    (COMPLETION, filled('{"prompt":["a","', ",", '"]}'), 400),
    (CHAT, filled(TEXT, "a ", '"}]}'), 400),
    ("/tokenize", filled('{"prompt":"', "a ", '"}'), 400),
    ("/tokenize", filled(TEXT, "a ", '"}]}'), 400),
)


def test_large_bodies_cost_little(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in answer, and little is done for it, none of it on the event loop."""
    served = start()
    faults, encoded, on_loop = [0], [0], [0]
    whole = Tokenizer._ids

    def counted_validation(error: ValidationError) -> ApiError:
        faults[0] += min(error.error_count(), 101)
        on_loop[0] += not threading.current_thread().name.startswith("asyncio")
        return of_validation(error)

    def ids(self: Tokenizer, text: str, special: bool) -> list[int]:
        encoded[0] += len(text)
        on_loop[0] += not threading.current_thread().name.startswith("asyncio")
        return whole(self, text, special)

    def decode(*_: Any, **__: Any) -> str:
        raise AssertionError

    monkeypatch.setattr(middleware, "of_validation", counted_validation)
    monkeypatch.setattr(Tokenizer, "_ids", ids)
    monkeypatch.setattr(Tokenizer, "decode", decode)
    for path, body, expected in LARGE:
        faults[0] = encoded[0] = on_loop[0] = 0
        status, _, content = call(served, path, body)
        error, shown = json.loads(content)["error"], (path, body[:60], content[:300])
        assert status == expected and len(content) < 400 and "\n" not in error["message"], shown
        assert encoded[0] <= 1 << 16 and on_loop == [0], (shown, encoded)
        assert faults[0] <= 6 or b"true" in body, (shown, faults)
        assert status == 400 or faults == encoded == [0], shown


def test_values_are_those_outside_strings() -> None:
    """As the parser counts them, for any strings."""
    rng = random.Random(1)

    def value(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(["", ',[{:"\\', '\\"', "\\\\", 5, None, 'a\\\\"b,'])
        if rng.random() < 0.5:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        return {f'k"{n}\\,': value(depth - 1) for n in range(rng.randrange(4))}

    def openings(one: Any) -> int:
        if isinstance(one, list):
            return 1 + max(0, len(one) - 1) + sum(map(openings, one))
        if isinstance(one, dict):
            return 1 + len(one) + max(0, len(one) - 1) + sum(map(openings, one.values()))
        return 0

    for _ in range(300):
        values = value(5)
        assert middleware._values(json.dumps(values).encode()) == openings(values), values
    check_values(b'{"prompt":"' + b',[{:\\"' * MAX_VALUES + b'"}')


def test_values_are_those_outside_strings_wherever_parts_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = json.dumps(
        {'a"\\\\': ['\\"', ',[{\\\\"', 1, {"": '"'}], "\\": "\\\\\\", "b": [[], ","]}
    ).encode()
    expected = middleware._values(text)
    for size in range(1, len(text) + 2):
        monkeypatch.setattr(middleware, "_PART", size)
        assert middleware._values(text) == expected, size


def test_the_most_values_are_taken() -> None:
    ids = list(range(1000)) * 262
    body = parse_body(json.dumps({"prompt": ids}).encode(), CompletionRequest)
    assert body.prompt == ids


def test_a_text_is_encoded_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = byte_tokenizer(), [0]
    whole = Tokenizer._ids

    def ids(self: Tokenizer, text: str, special: bool) -> list[int]:
        seen[0] += len(text)
        return whole(self, text, special)

    monkeypatch.setattr(Tokenizer, "_ids", ids)
    text = "some words " * 100_000
    with pytest.raises(TooManyTokens, match="context of 30000 tokens cannot hold 1100000 char"):
        tokenizer.encode(text, most=30_000)
    assert seen[0] < 100_000
    assert len(tokenizer.encode(text, most=len(text) // 2)) == len(text)
    assert len(tokenizer.encode(text)) == len(text)


def test_a_client_that_left_before_its_answer_is_logged_as_499(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(middleware.progress, "event", lambda _, line: lines.append(line))
    settings = SimpleNamespace(requests_per_minute=None, tokens_per_minute=None)
    server: Any = SimpleNamespace(keys={}, settings=settings)
    guard = middleware.Guard(None, server)  # type: ignore[arg-type]
    for status in (200, 0):
        guard._log({"state": {}, "method": "GET", "path": "/"}, status, 0.1, "an id")
    assert [line["status"] for line in lines] == [200, 499]


def limited(served: Served, key: str = "one", path: str = "/v1/completions") -> httpx2.Response:
    body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.post(f"{served.url}{path}", json=body, headers=headers, timeout=60)


def test_each_key_has_a_number_of_requests_a_minute(start: Start) -> None:
    served = start(key=b"alice one\nbob two", requests_per_minute=2)
    first, second, third = (limited(served) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert "more than 2 requests per minute" in third.json()["error"]["message"]
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert 30 < float(third.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert limited(served, "two").status_code == 200
    assert limited(served, path="/tokenize").status_code != 429
    assert httpx2.get(f"{served.url}/v1/models", headers={"x-api-key": "one"}).status_code == 200


def test_tokens_per_minute_are_counted_once_known(start: Start) -> None:
    served = start(tokens_per_minute=12)
    first, second, third = (limited(served) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    used = first.json()["usage"]["total_tokens"]
    assert int(second.headers["x-ratelimit-remaining-tokens"]) in (12 - used, 13 - used)
    assert "more than 12 tokens per minute" in third.json()["error"]["message"]
