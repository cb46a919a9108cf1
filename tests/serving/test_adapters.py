"""Adapters that clients load and unload."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from lite_runner.errors import ArtifactError
from tests.doc_folder import write_adapter
from tests.serving.conftest import Served, Start
from tests.serving.test_app import Slow, call
from tests.serving.test_completions import alone, text_of
from tests.serving.test_server import Launch
from tests.tiny_gguf import write_tiny_gguf

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def served(start: Start) -> Served:
    """One that takes adapters of any path but bad."""
    served = start(Slow())

    def open_adapter(name: str, folder: str) -> Callable[[], None]:
        if folder == "bad":
            raise ArtifactError("bad: no such folder")
        return lambda: served.backend.adapters.add(name)

    del served.backend.adapters.known["b"]
    served.server.adapters = ("a",)
    served.server.open_adapter = open_adapter
    return served


def models(served: Served) -> list[str]:
    return [card.id for card in served.client.models.list().data]


def test_they_come_and_go(served: Served) -> None:
    status, _, said = call(served, LOAD, {"lora_name": "new", "lora_path": "x"})
    assert (status, said) == (200, b"Success: LoRA adapter 'new' added successfully.")
    assert models(served) == ["base", "a", "new"]
    answer = served.client.completions.create(model="new", prompt="x", max_tokens=3)
    assert answer.model == "new"
    status, _, said = call(served, UNLOAD, {"lora_name": "new"})
    assert (status, said) == (200, b"Success: LoRA adapter 'new' removed successfully.")
    assert models(served) == ["base", "a"]
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="new", prompt="x")
    assert call(served, LOAD, {"lora_name": "new", "lora_path": "x"})[0] == 200


def test_what_runs_is_completed_before_an_adapter_goes(served: Served) -> None:
    texts: list[Any] = []

    def ask() -> None:
        asked = {"model": "a", "prompt": "hello", "temperature": 0, "max_tokens": 60}
        texts.append(served.client.completions.create(**asked).choices[0].text)

    asking = [threading.Thread(target=ask) for _ in range(6)]  # more than run at a time
    for thread in asking:
        thread.start()
    while served.server.adapter_uses["a"] < 6:
        time.sleep(0.005)
    leaving = threading.Thread(target=call, args=(served, UNLOAD, {"lora_name": "a"}))
    leaving.start()
    while "a" in models(served):
        time.sleep(0.005)
    assert call(served, "/v1/completions", {"model": "a", "prompt": "x"})[0] == 404
    status, _, said = call(served, LOAD, {"lora_name": "a", "lora_path": "x"})
    assert status == 400 and b"there is a model a already" in said
    for thread in (*asking, leaving):
        thread.join()
    assert texts == [text_of(alone(b"hello", "a", max_new_tokens=60))] * 6
    assert served.backend.adapters.known.keys() & {"a"} == set()


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (LOAD, {"lora_name": "a", "lora_path": "x"}, 400, "there is a model a already"),
        (LOAD, {"lora_name": "base", "lora_path": "x"}, 400, "there is a model base already"),
        (LOAD, {"lora_name": "n", "lora_path": "bad"}, 400, "lora_path: bad: no such folder"),
        (LOAD, {"lora_name": "n", "lora_path": "x", "load_inplace": True}, 400, "load_inplace"),
        (LOAD, {"lora_name": "n"}, 400, "lora_path: missing"),
        (UNLOAD, {"lora_name": "ghost"}, 404, "no adapter 'ghost'"),
    ],
)
def test_what_cannot_be_done(
    served: Served, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    found, _, content = call(served, path, body)
    assert found == status and said in json.loads(content)["error"]["message"]
    assert models(served) == ["base", "a"]


def test_they_stay_unless_a_key_allows(start: Start) -> None:
    served = start()
    for path in (LOAD, UNLOAD):
        status, _, content = call(served, path, {"lora_name": "a", "lora_path": "x"})
        assert status == (403 if path == LOAD else 400)
    status, _, content = call(served, UNLOAD, {"lora_name": "a"})
    assert status == 403 and b"serve.load_adapters" in content


@pytest.mark.parametrize("key", ["adapter_root", "adapter_path"])
def test_the_key_needs_a_root(cli: Callable[..., Any], key: str) -> None:
    given = {"adapter_root": "adapter_root=.", "adapter_path": "adapter_path=lora_adapter.json"}
    given.pop(key)
    found = cli("run_mode=serve", "model=tiny_llama", "serve.load_adapters=true", *given.values())
    assert found.returncode == 2 and f"needs {key}=" in found.stderr


def test_a_server_takes_them_below_the_root_only(launch: Launch, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    write_tiny_gguf(tmp_path / "tiny.gguf")
    for number, folder in enumerate((root / "one", root / "two", outside / "three")):
        write_adapter(folder, number)
    (root / "link").symlink_to(outside / "three")
    (root / "files").mkdir()
    for file in (outside / "three").iterdir():
        (root / "files" / file.name).symlink_to(file)
    (root / "lora_adapter.json").write_text('{"one": "one"}')
    _, url = launch(
        "model=tiny.gguf",
        "adapter_path=root/lora_adapter.json",
        "adapter_root=root",
        "serve.load_adapters=true",
    )
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def load(name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        client.post("/load_lora_adapter", body=body, cast_to=str)

    load("two", "two")
    load("again", str(root / "two"))
    base = client.models.list().data[0].id
    asked: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 9, "logprobs": 0}
    found = {
        name: tuple(
            client.completions.create(model=name, **asked).choices[0].logprobs.token_logprobs
        )
        for name in (base, "one", "two", "again")
    }
    assert found["two"] == found["again"] and len(set(found.values())) == 3
    for path in ("../outside/three", str(outside / "three"), "link", "files"):
        with pytest.raises(openai.BadRequestError, match="lies outside adapter_root"):
            load("three", path)
    for name, path in (("three", "nothing"), ("../x", "two"), ("none", "two"), ("y", "t\0wo")):
        with pytest.raises(openai.BadRequestError):
            load(name, path)
    assert [card.id for card in client.models.list().data] == [base, "one", "two", "again"]
    client.post("/unload_lora_adapter", body={"lora_name": "two"}, cast_to=str)
    assert [card.id for card in client.models.list().data] == [base, "one", "again"]
    found_again = client.completions.create(model="again", **asked).choices[0].logprobs
    assert tuple(found_again.token_logprobs) == found["again"]
