"""The server around its answers: other endpoints, limits, clients that leave, failures."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

import openai
import pytest

from lite_runner import __version__, profiler, progress
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ArtifactError
from lite_runner.serving import middleware
from lite_runner.serving.errors import of_exception
from lite_runner.serving.middleware import MAX_BODY
from lite_runner.serving.state import Server
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
        self.lacks = 0  # steps to come that lack memory

    def forward(self, rows: Any) -> Any:
        time.sleep(0.005)
        if self.fails:
            raise RuntimeError("the memory is gone")
        if self.lacks:
            self.lacks -= 1
            raise MemoryError
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
    _, _, found = call(served, "/detokenize", {"tokens": [256, *b"hello"]})
    assert json.loads(found) == {"prompt": "<s>hello"}
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
        'vllm:num_preemptions_total{model_name="base"} 0.0',
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


def test_wrong_keys_are_slow_and_share_a_line_of_the_log(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "WRONG_KEY_S", 0.02)
    monkeypatch.setattr(middleware, "WRONG_KEY_LINES_S", 1000.0)
    served, began = start(key=b"secret"), time.monotonic()
    for _ in range(10):
        assert call(served, "/v1/models", Authorization="Bearer wrong")[0] == 401
    assert time.monotonic() - began >= 0.2
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "client=" in one]
    assert line.endswith('client=127.0.0.1 error="wrong key" requests=1')


def test_a_step_without_memory_ends_its_requests_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Slow()
    served, backend.lacks = start(backend), 2
    for _ in range(2):
        status, _, content = call(served, "/v1/completions", FOREVER)
        assert status == 503 and b"out of memory" in content
    assert call(served, "/v1/completions", FOREVER)[0] == 200
    assert call(served, "/health")[0] == 200
    assert sum("out of memory" in record.message for record in caplog.records) == 2


def test_a_foreign_host_name_is_refused_on_loopback(start: Start) -> None:
    served = start()
    assert call(served, "/version", Host="evil.example:80")[0] == 400
    assert call(served, "/version", Host="localhost")[0] == 200
    assert call(served, "/version", Host="[::1]:8000")[0] == 200
    assert call(served, "/ready", Host="10.0.0.7:8000")[0] == 200  # a probe of an orchestrator


def test_allowed_hosts(start: Start) -> None:
    served = start(allowed_hosts=("llm.example.com", "*.inner.example"))
    for host, status in (
        ("llm.example.com", 200),
        ("LLM.example.com:443", 200),
        ("a.b.inner.example", 200),
        ("localhost:8000", 200),
        ("inner.example", 400),
        ("x.llm.example.com", 400),
        ("evil-inner.example", 400),
    ):
        assert call(served, "/version", Host=host)[0] == status, host
    assert call(start(allowed_hosts=("*",)), "/version", Host="any.example")[0] == 200
    public = start(host="0.0.0.0", allowed_hosts=("llm.example.com",))
    assert call(public, "/version", Host="llm.example.com")[0] == 200
    assert call(public, "/version", Host="other.example")[0] == 400


def test_scripts_of_listed_origins_may_ask(start: Start) -> None:
    origin = "http://localhost:3000"
    served = start(key=b"secret", cors_origins=(origin,))
    asked = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type",
    }
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    given = {name.replace("_", "-"): value for name, value in asked.items()}
    connection.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **given})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    assert answer.getheader("Access-Control-Allow-Origin") == origin
    assert "authorization" in (answer.getheader("Access-Control-Allow-Headers") or "").lower()
    # What is refused can be read, too; other origins cannot read anything.
    for found, readable in ((origin, origin), ("http://evil.example", None)):
        status, headers, _ = call(served, "/v1/models", Origin=found)
        assert status == 401 and headers.get("access-control-allow-origin") == readable
    _, headers, _ = call(start(), "/v1/models", Origin=origin)
    assert "access-control-allow-origin" not in headers


def test_a_model_has_the_names_it_is_given(start: Start) -> None:
    served = start(model_name=("gpt-4", "llama"))
    cards = served.client.models.list().data
    assert [(card.id, card.parent) for card in cards] == [
        ("gpt-4", None),
        ("llama", None),
        ("a", "gpt-4"),
        ("b", "gpt-4"),
    ]
    for name in ("gpt-4", "llama"):
        assert served.client.completions.create(model=name, prompt="x").model == name
    status, _, content = call(served, "/v1/completions", {"model": "base", "prompt": "x"})
    assert status == 404 and b"available: gpt-4, llama, a, b" in content
    _, _, content = call(served, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert json.loads(content)["model"] == "gpt-4"


def test_process_and_build_metrics(start: Start) -> None:
    text = call(start(), "/metrics")[2].decode()
    for name in (
        "process_resident_memory_bytes ",
        "process_cpu_seconds_total ",
        "process_open_fds ",
    ):
        assert f"\n{name}" in text
    assert f'version="{__version__}"' in text and "\nlite_runner:build_info{" in text


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_stream_that_is_cut_is_logged(
    start: Start, capfd: pytest.CaptureFixture[str], log_format: Literal["text", "json"]
) -> None:
    progress.configure(1, log_format)
    try:
        served = start(Slow(length=8192), request_timeout=0.2)
        call(served, "/v1/completions", {**FOREVER, "stream": True})
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
        body = json.dumps({**FOREVER, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read(10)
        connection.close()
        served.until_idle()
        logged = ""
        while "disconnected" not in logged:
            logged += capfd.readouterr().err
    finally:
        progress.configure(1)
    cut = [line for line in logged.splitlines() if "/v1/completions" in line]
    shown = ('"error": "timeout"', '"error": "disconnected"')
    if log_format == "text":
        shown = ("error=timeout", "error=disconnected")
    assert all("200" in line and one in line for line, one in zip(cut, shown, strict=True))


def test_an_id_comes_back(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    progress.configure(1, "json")
    served = start()
    _, headers, _ = call(served, "/version", X_Request_Id="mine-1")
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = call(served, "/version", X_Request_Id="two words")
    assert headers["x-request-id"] != "two words"
    call(served, "/v1/completions", {"prompt": "hello", "max_tokens": 2}, X_Request_Id="mine-2")
    logged = ""
    while "mine-2" not in logged:  # the line follows the answer
        logged += capfd.readouterr().err
    progress.configure(1)
    lines = [json.loads(line) for line in logged.splitlines()]
    assert all(line["time"] and line["level"] == "info" for line in lines)
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


def test_waiting_requests_are_bounded(start: Start) -> None:
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


def test_a_failing_backend_is_reported_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
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


def test_the_adapters_in_use_are_reported(start: Start) -> None:
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
    while shown not in (metrics := call(served, "/metrics")[2].decode()):
        assert any(thread.is_alive() for thread in threads), metrics
    for thread in threads:
        thread.join()


def test_errors_do_not_echo_a_whole_request(start: Start) -> None:
    served, long = start(), "x" * (MAX_BODY // 2)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "x", "model": long}),
        ("/v1/completions", {"prompt": "x", long: 1}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {long: 1}}),
        ("/v1/completions", {"prompt": "x", "guided_regex": f"({long}"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", long: 1}]}),
        ("/tokenize", {"prompt": "x", "model": long}),
    ]
    for path, body in bodies:
        status, _, content = call(served, path, body)
        assert status in (400, 404) and len(content) < 2000, (path, list(body))


def test_numbers_that_no_model_takes_are_refused(start: Start) -> None:
    served = start()
    for field, value in (
        ("logit_bias", {"1" * 5000: 1}),
        ("repetition_penalty", 1e-308),
        ("repetition_penalty", 1e308),
    ):
        status, _, content = call(served, "/v1/completions", {"prompt": "x", field: value})
        assert (status, json.loads(content)["error"]["param"]) == (400, field)


def test_an_upload_that_ends_early_is_logged_as_left(
    start: Start, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    progress.configure(1)
    served = start()
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    connection.close()
    logged = ""
    while "/v1/completions" not in logged:
        logged += capfd.readouterr().err
    assert "status=499" in logged and "Traceback" not in logged
    assert not [record for record in caplog.records if record.exc_info]


def test_a_path_is_one_word_of_the_log(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    progress.configure(1)
    served = start()
    assert call(served, "/x%0aid=0%20status=200%1b[2J" + "y" * 9000)[0] == 404
    logged = ""
    while "404" not in logged:
        logged += capfd.readouterr().err
    (line,) = logged.splitlines()
    assert line.isprintable() and len(line) < 400
    assert r'path="/x\nid=0 status=200\u001b[2Jyy' in line


def test_faults_name_files_without_their_folders() -> None:
    for text, shown in (
        ("/home/a b/m/tokenizer_config.json: failed", "tokenizer_config.json: failed"),
        ("no '/a/b' in /c/d/e.json: 3/4 tokens/s", "no 'b' in e.json: 3/4 tokens/s"),
        ("see https://example.com/a/b", "see https://example.com/a/b"),
    ):
        assert of_exception(ArtifactError(text)).message == shown


def metric(served: Served, name: str) -> float:
    """The sum of a metric's values, over all its labels that begin as `name` does."""
    lines = call(served, "/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_metrics_add_up(start: Start) -> None:
    served = start(Slow(), request_timeout=1, max_queue=0)
    sums = Counter[str]()
    for seed in range(12):
        body = {"prompt": "hello", "max_tokens": 12, "seed": seed, "n": 2, "temperature": 1}
        usage = json.loads(call(served, "/v1/completions", body)[2])["usage"]
        sums.update({name: usage[name] for name in ("prompt_tokens", "completion_tokens")})
    ended = 'vllm:request_success_total{finished_reason="'
    assert metric(served, f'{ended}stop"') > 0  # with end tokens, which usage counts
    assert metric(served, "vllm:generation_tokens_total") == sums["completion_tokens"]
    assert metric(served, "vllm:prompt_tokens_total") == sums["prompt_tokens"]
    assert metric(served, ended) == 24
    assert call(served, "/v1/completions", {**FOREVER, "n": 2, "temperature": 1})[0] == 504
    assert metric(served, f'{ended}timeout"') == 2
    served.until_idle()
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    connection.request(
        "POST", "/v1/completions", json.dumps(FOREVER), {"Content-Type": "application/json"}
    )
    while served.server.engine.load.running == 0:
        time.sleep(0.005)
    connection.close()
    while not metric(served, f'{ended}abort"'):
        time.sleep(0.005)
    assert metric(served, ended) == 27
    assert metric(served, "vllm:prompt_tokens_total") == sums["prompt_tokens"] + 10


def test_a_client_that_leaves_as_a_token_comes() -> None:
    """Its request is cancelled, and does not run on."""
    puts: list[Callable[[Any], None]] = []
    cancelled: list[int] = []

    def submit(request: Any, put: Callable[[Any], None], **_: Any) -> int:
        puts.append(put)
        return 7

    engine = SimpleNamespace(submit=submit, cancel=cancelled.append)
    server: Any = SimpleNamespace(settings=SimpleNamespace(request_timeout=60), engine=engine)

    async def read() -> None:
        prompt = [1], GenerationConfig()
        async with Server.answer(server, [prompt], None, None) as outputs:
            async for _ in outputs:
                pass

    async def leave() -> None:
        reading = asyncio.ensure_future(read())
        while not puts:
            await asyncio.sleep(0)
        for _ in range(9):  # until it waits
            await asyncio.sleep(0)
        puts[0]("a token")
        reading.cancel()
        done, _ = await asyncio.wait({reading}, timeout=5)
        assert done and reading.cancelled() and cancelled == [7]

    asyncio.run(leave())


def test_priorities_may_be_switched_off(start: Start) -> None:
    for on, expected in ((True, 200), (False, 400)):
        served = start(priority=on)
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            asked = {**body, "max_tokens": 1}
            assert call(served, path, {**asked, "priority": -1})[0] == expected
            assert call(served, path, {**asked, "priority": 0})[0] == 200


@pytest.mark.parametrize("module", ["system.memory.free_addresses", "serving.state.free_memory"])
def test_a_long_body_is_refused_before_memory_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Libraries in Rust end the process where they get none."""
    served = start()
    body = {"prompt": "x", "max_tokens": 1}
    for left, size, expected in ((1 << 30, 10**6, 400), (1 << 20, 1, 200), (30 << 20, 10**5, 503)):
        monkeypatch.setattr(f"lite_runner.{module}", lambda left=left: left)
        body["prompt"] = "x" * size
        assert call(served, "/v1/completions", body)[0] == expected, (left, size)


def test_cache_not_yet_allocated_is_not_free(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system kills a process at its cgroup's limit without a warning: bodies leave the memory
    to the model that its plan gave it, and count as long as they are there."""
    served, mebibyte = start(), 1 << 20
    monkeypatch.setattr("lite_runner.serving.state.free_memory", lambda: 300 * mebibyte)
    taken = 100
    monkeypatch.setattr("lite_runner.serving.state.resident", lambda: taken * mebibyte)
    body = {"prompt": "x" * mebibyte, "max_tokens": 1}  # 32 MiB, and 16 of each byte
    for need, taken, expected in ((353, 100, 503), (353, 200, 400), (340, 100, 400)):
        served.server.need = need * mebibyte
        assert call(served, "/v1/completions", body)[0] == expected, (need, taken)
    served.server.need, while_read = 200 * mebibyte, []

    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * (4 * mebibyte)
        while_read.append(served.server.memory_left())

    served.server._reading = asyncio.Lock()  # of this loop
    assert asyncio.run(served.server.read(parts(), len)) == 4 * mebibyte
    assert [*while_read, served.server.memory_left()] == [196 * mebibyte, 200 * mebibyte]


def test_profiles_of_a_window(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start()
    status, _, body = call(served, "/start_profile", {})
    assert status == 404 and b"started with profile=true" in body
    monkeypatch.setattr(profiler, "folder", tmp_path)
    assert call(served, "/stop_profile", {})[0] == 400
    assert call(served, "/start_profile", {})[0] == 200
    asked = {"model": "base", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    assert call(served, "/v1/completions", asked)[0] == 200
    status, _, body = call(served, "/stop_profile", {})
    found = json.loads(body)
    assert status == 200 and found["steps"]["prompt_tokens"] == 5
    assert found["trace"] == "trace-1.json" and profiler.recorder is None
    events = json.loads((tmp_path / "trace-1.json").read_text("utf-8"))["traceEvents"]
    assert {"prefill", "decode"} <= {one["name"] for one in events}
    (request,) = found["requests"]
    assert (request["name"], request["requests"]) == ("POST /v1/completions", 1)
    (begins,) = (one for one in events if one["ph"] == "b")
    (ends,) = (one for one in events if one["ph"] == "e")
    assert begins["args"] == {"status": 200, "prompt_tokens": 5, "new_tokens": 4}
    assert begins["ts"] >= 0 and ends["ts"] - begins["ts"] == pytest.approx(
        request["seconds"] * 1e6, abs=1
    )
