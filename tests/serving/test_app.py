"""The server around its answers: other endpoints, limits, clients that leave, failures."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from lite_runner import __version__
from lite_runner.serving.app import MAX_BODY
from tests.generation.mock import MockBackend
from tests.serving.conftest import Served, Start, letters

FOREVER = {"model": "base", "prompt": "hello", "max_tokens": 200, "ignore_eos": True}


def call(
    served: Served, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request."""
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is None:
        connection.request("GET", path, headers=given)
    else:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json", **given})
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}
    content = answer.read()
    connection.close()
    return *found, content


class Slow(MockBackend):
    """Steps of some milliseconds, and one that fails where it is told to."""

    def __init__(self, fails: bool = False, length: int = 256) -> None:
        super().__init__(letters, 4, length, 4)
        self.fails = fails

    def forward(self, rows: Any) -> Any:
        time.sleep(0.005)
        if self.fails:
            raise RuntimeError("the memory is gone")
        return super().forward(rows)


def test_models_are_the_base_and_its_adapters(start: Start) -> None:
    served = start()
    cards = served.client.models.list().data
    assert [(card.id, card.parent) for card in cards] == [
        ("base", None),
        ("a", "base"),
        ("b", "base"),
    ]
    assert served.client.models.retrieve("a").root == "a"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("c")


def test_tokens_there_and_back(start: Start) -> None:
    served = start()
    _, _, found = call(served, "/tokenize", {"prompt": "hello"})
    assert json.loads(found) == {"count": 5, "max_model_len": 256, "tokens": list(b"hello")}
    _, _, found = call(served, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(json.loads(found)["tokens"]) == b"[user]x\n[assistant]"
    _, _, found = call(served, "/detokenize", {"tokens": list(b"hello")})
    assert json.loads(found) == {"prompt": "hello"}
    status, _, found = call(served, "/tokenize", {})
    error = json.loads(found)["error"]
    assert status == 400 and "either prompt or messages" in error["message"]
    assert error["param"] == "prompt"


def test_health_version_and_metrics(start: Start) -> None:
    served = start()
    assert call(served, "/health")[0] == call(served, "/ready")[0] == 200
    assert json.loads(call(served, "/version")[2]) == {"version": __version__}
    served.client.completions.create(model="base", prompt="hello", max_tokens=3)
    text = call(served, "/metrics")[2].decode()
    for line in (
        'vllm:num_requests_running{model_name="base"} 0.0',
        'vllm:num_requests_waiting{model_name="base"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="base"} 0.0',
        'vllm:prompt_tokens_total{model_name="base"} 5.0',
        'vllm:prefix_cache_queries_total{model_name="base"} 5.0',
        'vllm:time_to_first_token_seconds_count{model_name="base"} 1.0',
        'vllm:request_queue_time_seconds_count{model_name="base"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="base"} 1.0',
    ):
        assert f"\n{line}\n" in text


def test_paths_methods_and_bodies_that_are_not_there(start: Start) -> None:
    served = start()
    for path, body, headers, status in (
        ("/v1/nothing", None, {}, 404),
        ("/v1/completions", None, {}, 405),
        ("/v1/completions", b"{", {}, 400),
        ("/v1/completions", b"[]", {}, 400),
        ("/v1/completions", b"\xff", {}, 400),
        ("/v1/completions", b"[" * 10_000, {}, 400),
        ("/v1/completions", {}, {}, 400),
        ("/v1/completions", {"prompt": "x"}, {"Content_Type": "text/plain"}, 415),
        ("/v1/completions", b" " * (MAX_BODY + 1), {}, 413),
    ):
        found, _, content = call(served, path, body, **headers)
        assert found == status and json.loads(content)["error"]["message"], (path, content)


def test_a_key_opens_all_but_health(start: Start) -> None:
    served = start(key=b"secret")
    assert call(served, "/health")[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/v1/nothing"):
        status, headers, _ = call(served, path)
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert call(served, path, Authorization="Bearer wrong")[0] == 401
        assert call(served, path, Authorization="secret")[0] == 401
        assert call(served, path, Authorization="Bearer secret")[0] != 401


def test_a_foreign_host_name_is_refused_on_loopback(start: Start) -> None:
    served = start()
    assert call(served, "/health", Host="evil.example:80")[0] == 400
    assert call(served, "/health", Host="localhost")[0] == 200
    assert call(served, "/health", Host="[::1]:8000")[0] == 200


def test_an_id_comes_back(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    served = start(log_format="json")
    _, headers, _ = call(served, "/version", X_Request_Id="mine-1")
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = call(served, "/version", X_Request_Id="two words")
    assert headers["x-request-id"] != "two words"
    call(served, "/v1/completions", {"prompt": "hello", "max_tokens": 2}, X_Request_Id="mine-2")
    logged = ""
    while "mine-2" not in logged:  # the line follows the answer
        logged += capfd.readouterr().err
    lines = [json.loads(line) for line in logged.splitlines()]
    assert [line["status"] for line in lines] == [200] * 3
    assert (lines[0]["id"], lines[2]["id"], lines[2]["prompt_tokens"]) == ("mine-1", "mine-2", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(start: Start, stream: bool) -> None:
    served = start(Slow(length=8192))
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    body = json.dumps({**FOREVER, "max_tokens": 8000, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    while served.server.engine.load.running == 0:
        time.sleep(0.005)
    connection.close()
    served.until_idle()
    assert served.server.engine.load.running == 0
    assert len(served.backend.steps) < 8000  # it was not completed
    assert served.client.completions.create(model="base", prompt="x").choices


def test_what_waits_is_bounded(start: Start) -> None:
    served = start(Slow(), max_queue=1)
    threads = [
        threading.Thread(target=call, args=(served, "/v1/completions", FOREVER)) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    while served.server.engine.load.running < 4 or served.server.engine.load.waiting < 1:
        time.sleep(0.005)
    status, headers, content = call(served, "/v1/completions", FOREVER)
    assert status == 429 and headers["retry-after"] == "1"
    assert json.loads(content)["error"]["code"] == "queue_full"
    for thread in threads:
        thread.join()
    assert call(served, "/v1/completions", {"prompt": "x"})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_its_time(start: Start, stream: bool) -> None:
    served = start(Slow(), request_timeout=0.1)
    status, _, content = call(served, "/v1/completions", {**FOREVER, "stream": stream})
    assert (status == 504) is not stream and b'"code":"timeout"' in content.replace(b": ", b":")
    served.until_idle()


def test_a_backend_that_fails_is_told_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    served = start(Slow(fails=True))
    for _ in range(3):
        status, _, content = call(served, "/v1/completions", FOREVER)
        assert status == 503 and json.loads(content)["error"]["code"] == "unavailable"
    assert call(served, "/health")[0] == call(served, "/ready")[0] == 503
    assert sum("the engine has failed" in record.message for record in caplog.records) == 1


def test_a_fault_of_one_request_is_not_the_others(start: Start) -> None:
    class Nan(MockBackend):
        def forward(self, rows: Any) -> Any:
            found = super().forward(rows).copy()
            for place, row in enumerate(rows):
                if row.tokens[0] == ord("!"):
                    found[place] = float("nan")
            return found

    served = start(Nan(letters, 4, 256, 4))
    status, _, content = call(served, "/v1/completions", {"prompt": "!", "max_tokens": 2})
    assert status == 500 and b"NaN" in content
    assert call(served, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_the_adapters_in_use_are_told(start: Start) -> None:
    served = start(Slow())
    threads = [
        threading.Thread(target=call, args=(served, "/v1/completions", {**FOREVER, "model": name}))
        for name in ("a", "b", "a", "a", "a")
    ]
    for thread in threads:
        thread.start()
        while served.server.adapter_uses.total() < threads.index(thread) + 1:
            time.sleep(0.005)
    shown = 'max_lora="0",running_lora_adapters="a,b",waiting_lora_adapters="a"'
    while shown not in (told := call(served, "/metrics")[2].decode()):
        assert any(thread.is_alive() for thread in threads), told
    for thread in threads:
        thread.join()
