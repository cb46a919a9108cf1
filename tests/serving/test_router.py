"""Several models behind one address: loading on demand, room, routes, and their metrics."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lite_runner.config.argv import parse
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from lite_runner.run_modes.serve import Config, models_of, planned
from lite_runner.serving import router
from lite_runner.serving.errors import ApiError
from lite_runner.serving.metrics import merged
from lite_runner.serving.router import Models, ServedModel
from lite_runner.serving.state import Gone, cancel_on_disconnect
from tests.serving.conftest import SETTINGS, Launch


def config_of(*words: str) -> Config:
    config, _ = resolve(parse(["run_mode=serve", *words], heads()))
    assert isinstance(config, Config)
    return config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two models."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "small.yaml").write_text(
        "model: tiny_llama\nseed: 5\nserve: {max_running: 2}\n"
        "processor: {tokenizer: {chat_template: '{{ messages[-1].content }}'}}\n"
    )
    (folder / "other.yml").write_text("model: tiny_gpt2\nserve.max_length: 64\n")
    (folder / "notes.txt").write_text("nothing")
    return folder


def test_each_model_has_the_keys_of_the_server_and_its_own(folder: Path) -> None:
    typed = (f"serve.models=[{folder},tiny_qwen2]", "seed=7", "serve.max_queue=9", "temperature=0")
    models = models_of(config_of(*typed, "serve.api_key=env:SOME", "serve.cors_origins=['*']"))
    assert list(models) == ["other", "small", "tiny_qwen2"]
    other, small, third = models.values()
    assert [one.seed for one in models.values()] == [7, 5, 7]
    assert (small.serve.max_running, third.serve.max_running) == (2, "auto")
    assert (other.serve.max_length, small.serve.max_length) == (64, "auto")
    assert all(one.serve.max_queue == 9 and one.temperature == 0 for one in models.values())
    assert not any(one.serve.api_key or one.serve.cors_origins for one in models.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: tiny_llama\nserve.port: 80", "serve.port is a setting of the server"),
        ("model: tiny_llama\nserve: {max_runing: 2}", "max_runing"),
        ("model: nothing_such", "model: got 'nothing_such'"),
        ("model: tiny_llama\nserve.model_name: other", "other is named twice"),
    ],
)
def test_errors_of_models_name_their_file(folder: Path, text: str, says: str) -> None:
    (folder / "third.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        models_of(config_of(f"serve.models=[{folder}]"))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        ("serve.memory=8", "serve.models=[tiny_llama]"),
        ("serve.models=[tiny_llama]", "model=tiny_gpt2"),
        ("serve.models=[tiny_llama]", "serve.batch=requests.jsonl"),
        ("serve.models=[tiny_llama]", "serve.engine=ray"),
        ("serve.models=[tiny_llama]", "serve.model_name=x"),
    ],
)
def test_keys_that_need_a_single_model(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        config_of(*words)


class Fakes(Models):
    """Models whose processes are not started; each takes 3 GB of 7."""

    def __init__(self, **settings: Any) -> None:
        config = config_of("model=tiny_llama")
        chosen = replace(SETTINGS, memory="7GB", **settings)
        super().__init__(dict.fromkeys("abc", config), chosen, None, planned)
        self.started: list[str] = []
        self.may_start = asyncio.Event()

    async def _started(self, model: ServedModel) -> bool:
        self.started.append(model.name)
        model.bytes = 3 * 10**9
        while not self._fits(model):
            await self._make_room(model)
        await self.may_start.wait()
        model.state = "loaded"
        return True

    async def ask(self, name: str) -> None:
        await self.enter(self.every[name], self.settings.load_timeout)
        await self.leave(self.every[name])

    @property
    def states(self) -> str:
        return " ".join(model.state for model in self.every.values())


def test_the_least_recently_used_model_leaves() -> None:
    async def use() -> None:
        models = Fakes(requests_per_minute=1)
        assert models.settings.requests_per_minute is None  # counted by each model's server
        models.may_start.set()
        for name in "abac":
            await models.ask(name)
        assert models.states == "loaded unloaded loaded" and models.started == ["a", "b", "c"]
        await models.enter(models.every["a"])
        await models.ask("b")  # a is in use
        assert models.states == "loaded loaded unloaded"
        await models.enter(models.every["b"])
        waits = asyncio.create_task(models.ask("c"))
        await asyncio.sleep(0.05)
        assert not waits.done() and models.states == "loaded loaded loading"
        await models.leave(models.every["b"])
        await waits
        assert models.states == "loaded unloaded loaded"
        models.close()

    asyncio.run(use())


def test_a_request_waits_for_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    async def use() -> None:
        models = Fakes(load_timeout=0.05)
        with pytest.raises(ApiError) as raised:
            await models.ask("a")
        error = raised.value
        assert (error.status, error.code) == (503, "model_loading")
        assert error.headers == {"Retry-After": "5"}
        models.may_start.set()  # it goes on meanwhile
        while models.states != "loaded unloaded unloaded":
            await asyncio.sleep(0.01)
        await models.ask("a")
        assert models.started == ["a"]
        models.close()

    asyncio.run(use())


def test_a_client_that_leaves_loads_nothing() -> None:
    async def use() -> None:
        models, left = Fakes(), asyncio.Event()
        asked = [
            asyncio.create_task(cancel_on_disconnect(models.enter(models.every["a"]), one()))
            for one in (left.wait, asyncio.Event().wait)
        ]
        await asyncio.sleep(0.01)
        left.set()
        with pytest.raises(Gone):
            await asked[0]
        assert models.states == "loading unloaded unloaded"  # for the other one
        asked[1].cancel()
        while models.states != "unloaded unloaded unloaded":
            await asyncio.sleep(0.01)
        assert models.every["a"].users == 0
        models.close()

    asyncio.run(use())


def test_a_process_that_ends_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "run_model", chain)  # takes anything and says nothing

    async def use() -> None:
        config = config_of("model=tiny_llama").to_dict()
        models = Models({"a": config}, SETTINGS, None, planned)
        with pytest.raises(ApiError, match="its process ended") as raised:
            await models.enter(models.every["a"], 120)
        assert raised.value.code == "model_failed" and models.every["a"].state == "unloaded"
        models.close()

    asyncio.run(use())


def test_metrics_in_one_text() -> None:
    texts = [
        "# HELP n_total N.\n# TYPE n_total counter\nn_total 1.0\n",
        '# HELP n_total N.\n# TYPE n_total counter\nn_total{model_name="own"} 2.0\n',
        "# HELP n_total N.\n# TYPE n_total counter\nn_total 3.0\n",
    ]
    labels = [{"model_name": "a"}, {"model_name": "b"}, {}]
    whole = merged(zip(labels, texts, strict=True)).decode()
    assert whole.count("# TYPE") == 1
    (family,) = text_string_to_metric_families(whole)
    found = [(one.labels.get("model_name"), one.value) for one in family.samples]
    assert found == [("a", 1), ("own", 2), (None, 3)]


def test_models_come_and_go(launch: Launch, folder: Path) -> None:
    """Each is of some 150 MB by its estimate."""
    process, url = launch(
        f"serve.models=[{folder},tiny_qwen2]",
        "serve.memory=0.32GB",
        "serve.load_timeout=3600",
        model=None,
    )
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)

    def states() -> dict[str, str]:
        return {one.id: getattr(one, "state") for one in client.models.list()}  # noqa: B009

    def ask(model: str) -> str:
        answer = client.completions.create(model=model, prompt="hi", max_tokens=3, temperature=0)
        assert answer.model == model
        return answer.choices[0].text

    def processes() -> dict[int, int]:
        return {
            child.pid: child.memory_info().rss
            for child in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        }

    assert states() == {"other": "loaded", "small": "unloaded", "tiny_qwen2": "unloaded"}
    first = processes()
    text = ask("small")
    assert client.embeddings.create(model="small", input="hi").data
    assert states() == {"other": "loaded", "small": "loaded", "tiny_qwen2": "unloaded"}
    response = client.responses.create(model="small", input="hi", max_output_tokens=3)
    assert ask("tiny_qwen2") and states()["other"] == "unloaded"
    now = processes()
    assert len(now) == 2 and not first.keys() & now.keys()  # all that it took is free
    metrics = httpx2.get(f"{url}/metrics").text
    assert 'vllm:prompt_tokens_total{model_name="small"}' in metrics
    assert 'lite_runner:model_loaded{model_name="other"} 0.0' in metrics
    greedy = {"model": "small", "prompt": "hi", "max_tokens": 3, "temperature": 0}
    assert len(list(client.completions.create(**greedy, stream=True))) >= 3
    with pytest.raises(openai.NotFoundError, match="no response 'resp_x'"):
        client.responses.retrieve("resp_x")
    assert ask("other") and ask("tiny_qwen2") and states()["small"] == "unloaded"
    assert client.responses.retrieve(response.id) == response and states()["small"] == "loaded"
    again = {"model": "small", "previous_response_id": response.id, "temperature": 0}
    assert client.responses.create(input="so?", **again, max_output_tokens=3).output_text
    for status, body in ((404, {"model": "nope"}), (400, {"model": 5})):
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "hi", **body})
        assert answer.status_code == status and answer.json()["error"]["param"] == "model"
    for pid in processes():
        os.kill(pid, signal.SIGKILL)
    while "loaded" in states().values():
        pass
    assert ask("small") == text  # it is started again
    last = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    psutil.wait_procs(last)
    assert not any(one.is_running() for one in last)
