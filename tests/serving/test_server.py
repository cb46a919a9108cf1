"""run_mode=serve from the command line: start, signals, and refused settings."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import resource
import shutil
import signal
import ssl
import subprocess
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx2
import openai
import psutil
import pytest
from pydantic import BaseModel, Field

from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.native import instructions
from lite_runner.run_modes.serve import plan, planned
from lite_runner.serving.listening import check_certificate, listen
from lite_runner.serving.server import KEEP_ALIVE_S, serve_until_stopped
from tests.serving.conftest import SETTINGS, Launch
from tests.serving.test_router import config_of

SCHEMA = json.loads(
    '{"type": "object", "required": ["city", "days", "by_train"], "additionalProperties": false,'
    ' "properties": {"city": {"enum": ["Oslo", "Rome"]}, "by_train": {"type": "boolean"},'
    ' "days": {"type": "integer", "minimum": 1, "maximum": 30}}}'
)


def test_it_serves_and_ends_with_what_runs(launch: Launch, tmp_path: Path) -> None:
    process, url = launch()
    with urlopen(f"{url}/metrics") as metrics:
        (build,) = re.findall(r"^lite_runner:build_info{.*}", metrics.read().decode(), re.M)
    assert 'backend="native"' in build and f'engine="native, {instructions()} kernels"' in build
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 1, "seed": 1}
    scored = client.completions.create(
        model="tiny_llama", **asked, extra_body={"prompt_logprobs": 0}
    )
    first, *others = getattr(scored.choices[0], "prompt_logprobs")  # noqa: B009  (vLLM's own)
    assert first is None and [list(one) for one in others] == [[str(id)] for id in b"ello"]
    stream = client.completions.create(
        model="tiny_llama",
        prompt="hello",
        max_tokens=40,
        stream=True,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    os.kill(process.pid, signal.SIGTERM)
    rest = list(chunks)
    assert rest[-1].choices[0].finish_reason == "length"
    assert process.wait(60) == 0
    log = next((tmp_path / "outputs").glob("*/*serve*/run.log"))
    assert "POST path=/v1/completions status=200" in log.read_text()


def forever(url: str) -> Iterator[Any]:
    """The chunks of an answer that takes long."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny_llama", "prompt": "hello", "max_tokens": 8000}
    return iter(client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))


LONG = ("model.model_config.seq_length=8192",)


def status_of(url: str) -> int:
    try:
        with urlopen(url) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_requests_are_taken_for_a_while_after_sigterm(launch: Launch) -> None:
    process, url = launch("serve.drain_delay=600")
    assert status_of(f"{url}/ready") == 200
    os.kill(process.pid, signal.SIGTERM)
    while status_of(f"{url}/ready") != 503:
        pass
    assert status_of(f"{url}/health") == status_of(f"{url}/v1/models") == 200
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.completions.create(model="tiny_llama", prompt="x", max_tokens=2).choices
    os.kill(process.pid, signal.SIGTERM)  # enough
    assert process.wait(60) == 0


def test_it_ends_although_its_log_is_no_longer_read(launch: Launch) -> None:
    process, _ = launch("serve.drain_delay=0.1")
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None  # else it is read in the end
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0


WAITS = {"prompt": "hello", "max_tokens": 1}


@pytest.mark.parametrize("how", ["drain_timeout", "Ctrl-C"])
def test_streams_that_are_cut_end_with_an_error(launch: Launch, how: str, tmp_path: Path) -> None:
    seconds = 0.5 if how == "drain_timeout" else 600
    process, url = launch(
        *LONG, f"serve.drain_timeout={seconds}", "serve.log_format=json", "serve.max_running=3"
    )
    streams = [forever(url) for _ in range(3)]
    for stream in streams:
        next(stream)
    pool = ThreadPoolExecutor()
    waiting = [pool.submit(httpx2.post, f"{url}/v1/completions", json=WAITS) for _ in range(2)]
    while (
        'num_requests_waiting{model_name="tiny_llama"} 2.0' not in httpx2.get(f"{url}/metrics").text
    ):
        pass
    os.kill(process.pid, signal.SIGTERM)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if how == "Ctrl-C" and "shutting down: " in line:
            os.kill(process.pid, signal.SIGINT)
    for stream in streams:
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
    assert process.wait(60) == 0
    for asked in waiting:
        assert asked.result().status_code == 503
        assert asked.result().json()["error"]["code"] == "unavailable"
    requests = [line for line in lines if line["message"] == "request"]
    assert [line.get("error") for line in requests].count("unavailable") == 3
    assert [line["status"] for line in requests].count(503) == 2
    assert all({"time", "level"} <= line.keys() for line in lines)


def test_without_addresses_requests_are_refused_and_later_ones_are_not(launch: Launch) -> None:
    process, url = launch("model.model_config.seq_length=1024")
    size = psutil.Process(process.pid).memory_info().vms
    asked: dict[str, Any] = {"prompt": "x" * 200, "max_tokens": 2, "temperature": 0}
    expected = httpx2.post(f"{url}/v1/completions", json=asked)
    limit = size + (100 << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    large = json.dumps({"prompt": "some words " * 90_000}).encode()

    async def many() -> list[int]:
        limits, headers = httpx2.Limits(max_connections=None), {"Content-Type": "application/json"}
        async with httpx2.AsyncClient(limits=limits, timeout=300, headers=headers) as http:
            sent = [http.post(f"{url}/v1/completions", content=large) for _ in range(160)]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    statuses = asyncio.run(many())  # no connection is reset
    assert set(statuses) <= {400, 503} and 503 in statuses
    again = httpx2.post(f"{url}/v1/completions", json=asked)
    assert again.status_code == 200 and again.json()["choices"] == expected.json()["choices"]
    assert process.poll() is None


def test_every_line_of_the_log_is_json(cli: Callable[..., Any]) -> None:
    # An error at the start, too: here the port is taken.
    with closing(listen("127.0.0.1", 0)) as bound:
        port = f"serve.port={bound.getsockname()[1]}"
        found = cli("run_mode=serve", "model=tiny_llama", port, "serve.log_format=json")
    assert found.returncode == 3
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    assert [line["level"] for line in lines].count("error") == 1
    assert "Address already in use" in lines[-1]["message"]


@pytest.mark.parametrize(
    "key",
    [
        "serve.cors_origins=[localhost:3000]",
        "serve.cors_origins=['http://a.example/']",
        "serve.allowed_hosts=['a.example:80']",
        "serve.model_name=[a,a]",
        "serve.model_name=[]",
        "serve.drain_delay=-1",
    ],
)
def test_names_that_would_never_match(cli: Callable[..., Any], key: str) -> None:
    found = cli("run_mode=serve", "model=tiny_llama", key, "dry_run=true")
    assert found.returncode == 2 and key.partition("=")[0] in found.stderr


class Trip(BaseModel):
    """A client's measurements."""

    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=30)]
    by_train: bool


def test_structured_output(launch: Launch) -> None:
    _, url = launch("model.model_config.seq_length=1024")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for seed in range(3):
        asked = {"model": "tiny_llama", "prompt": "x", "seed": seed, "temperature": 5}
        form = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
        answer = client.completions.create(
            **asked, max_tokens=500, extra_body={"response_format": form}
        )
        Trip.model_validate_json(answer.choices[0].text)


def test_ctrl_c_twice_ends_at_once(launch: Launch) -> None:
    process, url = launch("serve.drain_timeout=600", "model.model_config.seq_length=8192")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    streams = [
        client.completions.create(
            model="tiny_llama",
            prompt="hello",
            max_tokens=8000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:
        if "shutting down: " in line:
            break
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 0


def test_idle_connections_are_kept_longer_than_clients_keep_them() -> None:
    # Else a request may go into a connection that the server is closing: it is reset.
    assert KEEP_ALIVE_S > 2 * (openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 0) > 0


def test_others_may_come_only_with_a_key(cli: Callable[..., object]) -> None:
    found = cli("run_mode=serve", "model=tiny_llama", "serve.host=0.0.0.0")
    assert found.returncode == 2 and "needs serve.api_key=env:NAME" in found.stderr


@pytest.mark.parametrize("key", ["num_beams=2", "adapter_id=a", "max_length=9", "logprobs=1"])
def test_fields_of_requests_are_no_keys_of_the_server(cli: Callable[..., object], key: str) -> None:
    found = cli("run_mode=serve", "model=tiny_llama", key)
    assert found.returncode == 2 and "has no effect with run_mode=serve" in found.stderr


def test_the_plan_of_a_server(cli: Callable[..., object]) -> None:
    found = cli("run_mode=serve", "model=smollm2_135m", "dry_run=true", "serve.max_running=3")
    assert found.returncode == 0, found.stderr
    assert "for 3 x 8192 tokens" in found.stdout
    found = cli("run_mode=serve", "model=tiny_llama", "serve.max_length=100000")
    assert found.returncode == 2 and "serve.max_length: got 100000" in found.stderr


def test_cycles_of_requests_are_collected() -> None:
    """A program's start looks for garbage among 100,000 objects at a time (app.console)."""
    left: list[weakref.ref[Any]] = []

    class Cycle:
        own: object

    class Http:
        """Leaves 5,000 cycles, such as asyncio's transport of a connection is one."""

        async def serve(self, _: Any) -> None:
            for _ in range(5000):
                one = Cycle()
                one.own = one
                left.append(weakref.ref(one))
            self.alive = sum(one() is not None for one in left)

    http: Any = Http()
    server: Any = SimpleNamespace(settings=SimpleNamespace(scheme="http", drain_delay=0))
    before = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        with closing(listen("127.0.0.1", 0)) as bound:
            asyncio.run(serve_until_stopped(http, server, bound, "tiny", lambda: None))
    finally:
        gc.set_threshold(*before)
    assert http.alive < 3000


def test_a_port_that_is_taken() -> None:
    taken = pytest.raises(EnvironmentFault, match=r"serve\.port=\d+: Address already in use")
    with closing(listen("127.0.0.1", 0)) as bound, taken:
        listen("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(EnvironmentFault, match=r"serve\.host=no\.such\.host"):
        listen("no.such.host.invalid", 0)
    with closing(listen("localhost", 0)) as one:
        assert one.getsockname()[1] > 0


def test_replicas_behind_a_server_do_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica on another machine does not have the server's address."""
    monkeypatch.setenv("KEY", "0123456789abcdef")
    words = ("model=tiny_llama", "serve.host=192.0.2.1", "serve.api_key=env:KEY")
    config = config_of(*words)
    with pytest.raises(EnvironmentFault, match=r"serve\.host=192.0.2.1, .*Cannot assign"):
        plan(config)
    planned(replace(config, serve=config.serve.behind).to_dict())


def test_tls(launch: Launch, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run([*command, "-nodes", *files, *subject], check=True, capture_output=True)
    _, url = launch("serve.tls_cert=cert.pem", "serve.tls_key=key.pem")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    assert url.startswith("https://")
    with urlopen(f"{url}/live", context=trusted) as answer:
        assert answer.status == 200
    body = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
    asked = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(asked, context=trusted) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] <= 3


def test_certificates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("none")
    serve = replace(SETTINGS, tls_cert=str(tmp_path / "cert.pem"), tls_key="nowhere")
    with pytest.raises(ConfigError, match="PEM"):
        check_certificate(serve)
    assert "need" in next(replace(SETTINGS, tls_cert="x").errors()).text
