"""A conversation with a server."""

from __future__ import annotations

import http.client
import io
import socket
import threading

import pytest

from lite_runner.app import main
from lite_runner.chat.conversation import Conversation
from lite_runner.chat.remote import RemoteModel
from lite_runner.errors import EnvironmentFault, RunnerError
from tests.serving.conftest import Start
from tests.serving.test_completions import alone, text_of
from tests.serving.test_thinking import SWITCHED, THOUGHT, start_with


def test_it_says_what_the_model_says_and_goes_on(start: Start) -> None:
    served = start()
    model = RemoteModel(served.url)
    assert (model.name, model.adapters) == ("base", ("a", "b"))
    options = {"do_sample": False, "max_new_tokens": 9}
    conversation = Conversation(model, options=options)
    pieces: list[str] = []
    first, _ = conversation.ask("hi", pieces.append)
    expected = text_of(alone(b"[user]hi\n[assistant]", max_new_tokens=9))
    assert first.text == "".join(pieces) == expected
    conversation.choose("a")
    other, _ = conversation.ask("hi", lambda _: None)
    history = f"[user]hi\n[assistant]{expected}\n[user]hi\n[assistant]".encode()
    assert other.text == text_of(alone(history, "a", max_new_tokens=9))
    conversation.choose("base")
    again, _ = conversation.ask("and?", lambda _: None)
    assert again.cached_tokens > 0 and again.prompt_tokens > first.prompt_tokens


def test_thinking_is_shown_and_not_sent_again(start: Start) -> None:
    conversation = Conversation(RemoteModel(start_with(start, SWITCHED, THOUGHT).url))
    pieces: list[str] = []
    answer, _ = conversation.ask("hi", pieces.append)
    assert "".join(pieces) == "<think>\nWhy?\n</think>\n\nYes."
    assert answer.text == conversation.messages()[-1]["content"] == "Yes."


def test_turns_that_the_context_does_not_hold_are_dropped(start: Start) -> None:
    conversation = Conversation(RemoteModel(start().url), options={"max_new_tokens": 4})
    for number in range(6):
        _, dropped = conversation.ask(f"{number}" * 60, lambda _: None)
    assert dropped and len(conversation.turns) < 6


def test_sampling_that_is_typed_is_passed_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = start()

    def output(*typed: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        assert main(["run_mode=chat", f"server={served.url}", "max_new_tokens=9", *typed]) == 0
        return capsys.readouterr().out

    options = {"temperature": 5, "seed": 3, "max_new_tokens": 9}
    asked = [{"role": "user", "content": "hi"}]
    sampled = RemoteModel(served.url).answer(asked, options, None, lambda _: None)
    greedy = text_of(alone(b"[user]hi\n[assistant]", max_new_tokens=9))
    assert sampled.text != greedy
    assert sampled.text in output("temperature=5", "seed=3")
    assert greedy in output("do_sample=false")


def test_failures_are_reported(start: Start) -> None:
    served = start(key=b"secret")
    with pytest.raises(EnvironmentFault, match="Bearer"):
        RemoteModel(served.url)
    model = RemoteModel(f"{served.url}/v1/", b"secret")
    with pytest.raises(RunnerError, match="top_p"):
        model.answer([{"role": "user", "content": "x"}], {"top_p": 7}, None, lambda _: None)
    with pytest.raises(EnvironmentFault, match="is it running"):
        RemoteModel("http://127.0.0.1:1")


PIECE = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", r": Remote end closed connection without response\n"),
        (b"what\r\n\r\n", r"got BadStatusLine\('what.*expected an answer of HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + PIECE, "ended before the answer did"),
        (CHUNKED % len(PIECE) + PIECE + b"\r\n", "ended before the answer did"),
        (CHUNKED % 999 + PIECE, "ended before the answer did"),
    ],
)
def test_a_server_that_dies_while_it_answers(answer: bytes, message: str) -> None:
    """What has come is no answer, and nobody has pressed Ctrl-C."""
    answers = [b"HTTP/1.1 200 OK\r\n\r\n" + b'{"data": [{"id": "base"}]}', answer]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for one in answers:
                connection, _ = server.accept()
                with connection, connection.makefile("rb") as request:
                    request.readline()
                    length = http.client.parse_headers(request).get("Content-Length", "0")
                    request.read(int(length))  # what is left unread would reset the connection
                    connection.sendall(one)

        thread = threading.Thread(target=serve)
        thread.start()
        model = RemoteModel(f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(EnvironmentFault, match=message):
            model.answer([{"role": "user", "content": "x"}], {}, None, lambda _: None)
        thread.join()
