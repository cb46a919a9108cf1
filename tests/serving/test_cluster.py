"""serve.engine=ray on a cluster of this machine: a head without processors, and two workers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai.types import Completion
from prometheus_client.parser import text_string_to_metric_families

from fuzz.chaos import ATTEMPTS, TOO_SLOW
from tests.paths import ROOT
from tests.run_modes.test_slora import WIDTHS, write_adapter
from tests.test_joined import free_port

NAMES = ("tiny_llama", "en", "zh")  # the base model and its adapters
SERVE = "run_mode=serve seed=1 serve.port=0 serve.engine=ray serve.replicas=2"
PLUGIN = """
import dataclasses

from lite_runner import register
from lite_runner.architectures import KNOWN

register(dataclasses.replace(KNOWN["llama"], name="mine"))
"""
# What the door sends where a replica answers with `messages`.
DOOR = """
import asyncio, json, sys
from types import SimpleNamespace
from lite_runner.serving import cluster

def sent_for(messages):
    asked, sent = [{"type": "http.request", "body": b"{}"}], []

    async def receive():
        if asked:
            return asked.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append({**message, "body": message.get("body", b"").decode(), "headers": None})

    replicas = SimpleNamespace(answer=SimpleNamespace(remote=lambda *_: messages))
    door = cluster.Door(SimpleNamespace(options=lambda **_: replicas), None, [])
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(door(scope, receive, send))
    return json.dumps(sent)
"""
# The answer of a replica, of each content type or not begun, fails.
FAILS = """
async def answer(content_type):
    yield {"type": "accepted"}
    if content_type:
        headers = [(b"content-type", content_type.encode())]
        yield {"type": "http.response.start", "status": 200, "headers": headers}
    raise KeyError("unforeseen")

for content_type in sys.argv[1:]:
    print(sent_for(answer(content_type)))
"""
# No replica accepts the request.
ALL_START = """
class Waiting:
    async def __anext__(self):
        await asyncio.Event().wait()

    def cancel(self):
        print("cancelled")

cluster._ACCEPT_S = 0.01
print(sent_for(Waiting()))
"""
MANY = 8000  # tokens of an answer that nobody waits for
MEMORY = 80_000_000  # bytes of a node's object store: nothing is put there


class Cluster:
    """Nodes of Ray, each a few processes of this machine, in a folder of their own."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._python = python
        self._nodes: list[subprocess.Popen[bytes]] = []
        try:
            self._start_all(folder)
        except BaseException:
            self.close()
            raise

    def _start_all(self, folder: Path) -> None:
        head = ("--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=0")
        self._start(folder, *head, "--include-dashboard=false", f"--temp-dir={folder}")
        for _ in range(2):
            self._start(folder, f"--address={self.address}", "--num-cpus=1")

    def _start(self, folder: Path, *options: str) -> None:
        for _ in range(ATTEMPTS):
            log = folder / f"node{len(self._nodes)}.log"
            node = self._started(log, *options)
            while b"Ray runtime started" not in log.read_bytes():
                if node.poll() is not None:
                    break
                time.sleep(0.2)
            else:
                return
            if TOO_SLOW not in log.read_text():
                break
        raise AssertionError(log.read_text())

    def _started(self, log: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [self._python, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += ["--node-ip-address=127.0.0.1", f"--object-store-memory={MEMORY}"]
        with log.open("wb") as file:
            node = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()
            node.wait()


class Served:
    """A server on the cluster, whose log is read as it comes."""

    def __init__(
        self, cluster: Cluster, python: Path, folder: Path, name: str, *options: str
    ) -> None:
        self.replicas: set[int] = set()  # processes that have logged something
        self.process = subprocess.Popen(
            [python, ROOT / "run_lite.py", *SERVE.split(), *options],
            cwd=folder,
            env={**cluster.env, "RAY_ADDRESS": cluster.address},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        found = self.until(rf"serving {name} on (http://\S+) \(2 replicas on Ray;")
        self.url = f"{found[1]}/v1"

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()

    def until(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            self.replicas |= {int(pid) for pid in re.findall(r":Replica pid=(\d+)", line)}
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(seen))

    def replica_of(self, request: str) -> int:
        """The process that has logged a request."""
        return int(self.until(rf"Replica pid=(\d+)\).*\bid={request} .*status=200")[1])

    async def text(self, model: str, id: str = "", tokens: int = 40, prompt: str = "hello") -> str:
        """The greedy answer of a model, streamed. Raises openai.APIError."""
        async with await self.answer(model, id, tokens, prompt) as stream:
            return await rest(stream)

    def models(self, id: str) -> tuple[set[str], int]:
        """The models that a replica lists, and its process."""
        client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)
        cards = client.models.list(extra_headers={"X-Request-Id": id}).data
        return {card.id for card in cards}, self.replica_of(id)

    def post(self, path: str, **body: str) -> str:
        """Raises openai.APIStatusError."""
        client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)
        return client.post(path, body=body, cast_to=str)

    def metrics(self, name: str) -> dict[str, float]:
        """The value of a metric in each replica."""
        with urllib.request.urlopen(self.url.removesuffix("v1") + "metrics") as answer:
            text = answer.read().decode()
        return {
            sample.labels["replica"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    async def answer(
        self, model: str, id: str, tokens: int, prompt: str = "hello"
    ) -> openai.AsyncStream[Completion]:
        client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)
        return await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": id} if id else {},
        )


async def rest(stream: openai.AsyncStream[Completion]) -> str:
    """The text that is still to come."""
    parts, reason = [], None
    async for chunk in stream:
        parts.append(chunk.choices[0].text)
        reason = chunk.choices[0].finish_reason or reason
    assert reason == "length"
    return "".join(parts)


@pytest.fixture(scope="module")
def cluster(ray_python: Path) -> Iterator[Cluster]:
    # Ray's sockets are below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        started = Cluster(ray_python, Path(folder))
        try:
            yield started
        finally:
            started.close()


def test_replicas_register_plugins(
    cluster: Cluster, ray_python: Path, tmp_path: Path, llama_called_mine: Path
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    options = (
        *("plugins=mine.py", "model=auto", f"load_checkpoint={llama_called_mine}"),
        f"serve.port={free_port()}",  # one that the replicas, on the same machine, must not ask for
    )
    with Served(cluster, ray_python, tmp_path, "model", *options) as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
        assert [card.id for card in client.models.list()] == ["model"]
        assert client.completions.create(model="model", prompt="hello", max_tokens=2).usage


@pytest.fixture(scope="module")
def served(
    cluster: Cluster, ray_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One for all tests, of which the last ends it."""
    folder = tmp_path_factory.mktemp("served")
    for rank, name in enumerate(NAMES[1:], 1):
        write_adapter(folder / name, rank, WIDTHS, 2.0)
    listing = {name: name for name in NAMES[1:]}
    (folder / "lora_adapter.json").write_text(json.dumps(listing))
    write_adapter(folder / "later", 2, WIDTHS, 3.0)
    options = (
        *("adapter_path=lora_adapter.json", "model.model_config.num_layers=1"),
        "model.model_config.seq_length=8192",
        *("serve.load_adapters=true", "adapter_root=."),
    )
    with Served(cluster, ray_python, folder, "tiny_llama", "model=tiny_llama", *options) as server:
        yield server


def test_texts_that_begin_alike_go_to_one_replica(served: Served) -> None:
    async def run() -> None:
        homes: set[int] = set()
        for number in itertools.count():
            begin, found = f"{number} is how this begins. " * 60, set()
            for turn in range(2):
                id = f"begins-{number}-{turn}"
                await served.text("tiny_llama", id, 2, begin + "More of it. " * turn)
                found.add(served.replica_of(id))
            assert len(found) == 1
            homes |= found
            if len(homes) == 2:
                break

    asyncio.run(run())
    queries = sum(served.metrics("vllm:prefix_cache_queries_total").values())
    hits = sum(served.metrics("vllm:prefix_cache_hits_total").values())
    assert hits > 0.4 * queries  # of the second ones, nearly all


def test_metrics_are_those_of_all_replicas(served: Served) -> None:
    before = served.metrics("vllm:generation_tokens_total")
    asyncio.run(served.text("tiny_llama", tokens=7))
    after = served.metrics("vllm:generation_tokens_total")
    assert len(before) == len(after) == 2
    assert sum(after.values()) == sum(before.values()) + 7


def test_an_adapter_is_loaded_on_all_replicas_or_none(served: Served) -> None:
    known, asked = {*NAMES}, 0

    def lists(expected: set[str]) -> bool:
        """True if both replicas list these models."""
        nonlocal asked
        seen = set()
        while len(seen) < 2:
            asked += 1
            names, replica = served.models(f"listed-{asked}")
            assert names == expected
            seen.add(replica)
        return True

    with pytest.raises(openai.BadRequestError, match="lora_path"):
        served.post("/load_lora_adapter", lora_name="later", lora_path="nothing")
    assert lists(known)
    answer = served.post("/load_lora_adapter", lora_name="later", lora_path="later")
    assert answer == "Success: LoRA adapter 'later' added successfully."
    assert lists(known | {"later"})
    served.post("/unload_lora_adapter", lora_name="zh")
    assert lists((known | {"later"}) - {"zh"})
    with pytest.raises(openai.NotFoundError, match="no adapter 'zh'"):
        served.post("/unload_lora_adapter", lora_name="zh")
    served.post("/load_lora_adapter", lora_name="zh", lora_path="zh")
    assert lists(known | {"later"})


def test_a_replica_that_dies_is_replaced(served: Served) -> None:
    """The new one has the adapters that clients have loaded."""

    async def run() -> None:
        alone = {name: await served.text(name) for name in NAMES}
        assert len(set(alone.values())) == len(NAMES)
        victim = 0
        # Adapters are routed to where they are loaded.
        for number in range(4):
            await served.text("en", f"routed-{number}", tokens=2)
            replica = served.replica_of(f"routed-{number}")
            assert victim in (0, replica)
            victim = replica
        asked = [NAMES[number % len(NAMES)] for number in range(18)]
        tasks = [asyncio.ensure_future(served.text(name)) for name in asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks += [asyncio.ensure_future(served.text(name, tokens=200)) for name in asked]
        await asyncio.sleep(0.2)
        known = set(served.replicas)
        assert len(known) == 2
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for name, answer in zip(asked + asked, answers, strict=True):
            if isinstance(answer, str):
                assert answer.startswith(alone[name])
            else:  # of the replica that died, reported as errors of the protocol are
                assert isinstance(answer, openai.APIError) and answer.code == "unavailable"
                assert "the replica of this request has failed" in str(answer)
        assert any(isinstance(answer, str) for answer in answers)
        # All goes on, and another replica takes its share.
        number, replica = 0, victim
        while replica in known:
            number += 1
            await served.text("tiny_llama", f"again-{number}", 2, f"hello {number}")
            names, replica = await asyncio.to_thread(served.models, f"listed-again-{number}")
            assert names == {*NAMES, "later"}
        for name in NAMES:
            assert await served.text(name) == alone[name]

    asyncio.run(run())


def test_it_is_the_same_application(served: Served) -> None:
    with urllib.request.urlopen(served.url.removesuffix("v1")) as page:
        assert b"<title>lite-runner</title>" in page.read()
        assert len(page.headers.get_all("X-Request-Id")) == 1
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    for path in ("health", "ready"):
        with urllib.request.urlopen(served.url.removesuffix("v1") + path) as answer:
            assert answer.status == 200
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    assert {card.id for card in client.models.list()} == {*NAMES, "later"}
    with pytest.raises(openai.NotFoundError, match="no model 'nobody'"):
        client.completions.create(model="nobody", prompt="hello")
    with pytest.raises(openai.BadRequestError, match="top_p: Input should be greater than 0"):
        client.completions.create(model="en", prompt="hello", top_p=0)


def test_running_requests_complete_and_disconnected_clients_are_dropped(served: Served) -> None:
    async def run() -> str:
        async with await served.answer("en", "left", MANY) as leaving:
            await anext(leaving)
        assert int(served.until(r"\bid=left .*completion_tokens=(\d+)")[1]) < MANY
        async with await served.answer("zh", "stays", 1000) as running:
            await anext(running)
            served.process.send_signal(signal.SIGTERM)
            return await rest(running)

    assert asyncio.run(run())
    assert served.process.wait() == 0


def test_an_unexpected_error_is_reported(ray_python: Path) -> None:
    types = ("", "text/event-stream", "application/json")
    done = subprocess.run(
        [ray_python, "-c", DOOR + FAILS, *types],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stderr.count("a request failed") == len(types)
    assert done.stderr.count("KeyError: 'unforeseen'") == len(types)
    message = "internal error; the server's log has it"
    for content_type, line in zip(types, done.stdout.splitlines(), strict=True):
        start, *others = json.loads(line)
        if content_type == "application/json":  # uvicorn ends the connection
            assert start["status"] == 200 and not others
            continue
        assert start["status"] == (200 if content_type else 500)
        assert not others[-1].get("more_body")
        body = others[-1]["body"].removeprefix("data: ")
        assert json.loads(body)["error"]["message"] == message


def test_no_request_waits_for_all_replicas_to_start(ray_python: Path) -> None:
    done = subprocess.run(
        [ray_python, "-c", DOOR + ALL_START],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    cancelled, line = done.stdout.splitlines()
    start, answer = json.loads(line)
    assert cancelled == "cancelled" and start["status"] == 503
    error = {"code": "unavailable", "message": "no replica is ready: they are starting"}
    assert json.loads(answer["body"])["error"].items() >= error.items()


def test_without_the_extra_it_says_how_to_get_it(cli: Callable[..., object]) -> None:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        found = cli("run_mode=serve", "model=tiny_llama", "serve.engine=ray")
        assert found.returncode == 3
        assert "ray[serve] is not installed in this Python" in found.stderr
        assert f'{sys.executable} -m pip install "ray[serve]>=2.60"' in found.stderr


def test_replicas_are_of_ray(cli: Callable[..., object]) -> None:
    found = cli("run_mode=serve", "model=tiny_llama", "serve.replicas=2")
    assert found.returncode == 2 and "serve.replicas=2 needs serve.engine=ray" in found.stderr
