"""A model behind a server of OpenAI's protocol in a conversation."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from lite_runner.chat.conversation import Answer, ContextFull, Messages
from lite_runner.errors import EnvironmentFault, RunnerError, of_http
from lite_runner.system.files import parse_json

TIMEOUT_S = 600
MAX_LINE = 1 << 20
_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class RemoteModel:
    """A server's first model, or the one that is named. See ChatModel."""

    def __init__(self, url: str, key: bytes | None = None) -> None:
        """Asks the server for its models. Raises EnvironmentFault, RunnerError."""
        self._parts, self._url = urlsplit(url), url
        self._path = self._parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key.decode('latin-1')}"
        cards = self._json("/v1/models")["data"]
        self.name = next(str(card["id"]) for card in cards if not card.get("parent"))
        self.adapters = tuple(str(card["id"]) for card in cards if card.get("parent"))

    def answer(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        adapter: str | None,
        on_text: Callable[[str], None],
    ) -> Answer:
        body = {
            "model": adapter or self.name,
            "messages": [dict(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **_fields(options),
        }
        text, thinks, reason, usage, first = "", False, "interrupted", dict[str, Any](), 0.0
        began = time.perf_counter()
        try:
            for chunk in self._events(body):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    delta = choice["delta"]
                    for name in ("reasoning", "content"):
                        if not (piece := delta.get(name)):
                            continue
                        first = first or time.perf_counter() - began
                        if thinks is (name == "content"):
                            on_text("\n</think>\n\n" if thinks else "<think>\n")
                            thinks = not thinks
                        text += piece if not thinks else ""
                        on_text(piece)
                    reason = choice.get("finish_reason") or reason
        except KeyboardInterrupt:  # the connection is closed, which frees the server's slot
            pass
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Answer(
            text,
            reason,
            usage.get("prompt_tokens", 0),
            cached,
            usage.get("completion_tokens", 0),
            first,
            time.perf_counter() - began,
        )

    def close(self) -> None:
        """Each call has a connection of its own."""

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection, closed at the end. Raises EnvironmentFault where it breaks."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            with of_http():
                yield connection
        except OSError as error:
            raise EnvironmentFault(
                f"server={self._url}: {error.strerror or error}",
                "is it running, and is that its port?",
            ) from error
        finally:
            connection.close()

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer."""
        with self._connected() as connection:
            data = json.dumps(body).encode()
            connection.request("POST", f"{self._path}/v1/chat/completions", data, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise self._error(answer)
            while line := answer.readline(MAX_LINE):
                kind, _, content = line.decode("utf-8", "replace").strip().partition(": ")
                if kind != "data":
                    continue
                if content == "[DONE]":
                    return
                chunk = self._object(content)
                if "error" in chunk:
                    raise RunnerError(f"{self._url}: {chunk['error'].get('message')}")
                yield chunk
            raise http.client.IncompleteRead(b"")

    def _json(self, path: str) -> dict[str, Any]:
        with self._connected() as connection:
            connection.request("GET", self._path + path, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise self._error(answer)
            return self._object(answer.read(MAX_LINE).decode("utf-8", "replace"))

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = parse_json(text)
        except ValueError as error:
            raise RunnerError(f"{self._url}: the answer is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise RunnerError(f"{self._url}: answered {type(found).__name__}, expected an object")
        return found

    def _error(self, answer: http.client.HTTPResponse) -> RunnerError | ContextFull:
        content = answer.read(MAX_LINE).decode("utf-8", "replace")
        try:
            error = self._object(content)["error"]
        except (RunnerError, KeyError):
            error = {}
        if error.get("code") == "context_length_exceeded":
            return ContextFull()
        reason = error.get("message") or content[:200]
        if answer.status == 401:
            return EnvironmentFault(f"{self._url}: {reason}", "server_key=env:NAME names its key")
        return RunnerError(f"{self._url}: {answer.status}: {reason}")


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by OpenAI's names."""
    given = {_FIELDS.get(name, name): value for name, value in options.items()}
    if given.pop("do_sample", None) is False:
        given["temperature"] = 0
    return given
