"""Adapters that clients load and unload."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from lite_runner.api.llm import LLM
from lite_runner.app import main
from lite_runner.errors import ArtifactError
from lite_runner.serving.adapters import FolderWatch
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


def test_adapters_are_loaded_and_unloaded(served: Served) -> None:
    status, _, body = call(served, LOAD, {"lora_name": "new", "lora_path": "x"})
    assert (status, body) == (200, b"Success: LoRA adapter 'new' added successfully.")
    assert models(served) == ["base", "a", "new"]
    answer = served.client.completions.create(model="new", prompt="x", max_tokens=3)
    assert answer.model == "new"
    status, _, body = call(served, UNLOAD, {"lora_name": "new"})
    assert (status, body) == (200, b"Success: LoRA adapter 'new' removed successfully.")
    assert models(served) == ["base", "a"]
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="new", prompt="x")
    assert call(served, LOAD, {"lora_name": "new", "lora_path": "x"})[0] == 200


def test_running_requests_complete_before_an_adapter_is_unloaded(served: Served) -> None:
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
    status, _, body = call(served, LOAD, {"lora_name": "a", "lora_path": "x"})
    assert status == 400 and b"there is a model a already" in body
    for thread in (*asking, leaving):
        thread.join()
    assert texts == [text_of(alone(b"hello", "a", max_new_tokens=60))] * 6
    assert served.backend.adapters.known.keys() & {"a"} == set()
    assert not served.server.adapter_uses


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "a", "lora_path": "x"}, 400, "there is a model a already"),
        (LOAD, {"lora_name": "base", "lora_path": "x"}, 400, "there is a model base already"),
        (LOAD, {"lora_name": "n", "lora_path": "bad"}, 400, "lora_path: bad: no such folder"),
        (LOAD, {"lora_name": "n", "lora_path": "x", "load_inplace": True}, 400, "load_inplace"),
        (LOAD, {"lora_name": "n"}, 400, "lora_path: missing"),
        (UNLOAD, {"lora_name": "ghost"}, 404, "no adapter 'ghost'"),
    ],
)
def test_unsupported_requests(
    served: Served, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    found, _, content = call(served, path, body)
    assert found == status and message in json.loads(content)["error"]["message"]
    assert models(served) == ["base", "a"]


def test_loading_adapters_needs_a_key(start: Start) -> None:
    served = start()
    for path in (LOAD, UNLOAD):
        status, _, content = call(served, path, {"lora_name": "a", "lora_path": "x"})
        assert status == (403 if path == LOAD else 400)
    status, _, content = call(served, UNLOAD, {"lora_name": "a"})
    assert status == 403 and b"serve.load_adapters" in content


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["serve.load_adapters=true"], "serve.load_adapters=true needs adapter_root="),
        (["serve.watch_adapters=nowhere"], "serve.watch_adapters: no folder nowhere"),
        (["serve.watch_adapters=.", "serve.engine=ray"], "replicas on a Ray cluster have"),
        (["serve.watch_adapters=.", "backend=mslite"], "serve.watch_adapters has no effect with"),
        (["serve.max_lora_rank=8"], "serve.max_lora_rank=8 has an effect only with"),
        (["max_loaded_adapters=2"], "max_loaded_adapters needs adapter_path="),
    ],
)
def test_keys_that_need_others(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run_mode=serve", "model=tiny_llama", *given]) == 2
    assert message in capsys.readouterr().err


def look(watch: FolderWatch, served: Served) -> None:
    """Poll the folder once, and wait for the tasks that this started."""

    async def whole() -> None:
        await watch.poll()
        await asyncio.gather(*watch.changing.values())

    asyncio.run_coroutine_threadsafe(whole(), served.loop).result()


@pytest.fixture
def watched(start: Start, tmp_path: Path) -> tuple[FolderWatch, Served, Path, list[str]]:
    """A watch that loads a folder as its file says, the folder, and the loaded names."""
    served, root, read = start(Slow()), tmp_path / "adapters", list[str]()
    del served.backend.adapters.known["b"]
    served.server.adapters = ("a",)
    root.mkdir()

    def opened(name: str) -> Any:
        text = (root / name / "adapter_model.safetensors").read_text()
        read.append(f"{name}: {text}")
        if text == "half":  # the rest is written meanwhile
            put(root / name, "other half")
        if text == "broken":
            raise ArtifactError("broken: not whole")
        return lambda: served.backend.adapters.add(name)

    return FolderWatch(served.server, root, opened), served, root, read


def put(folder: Path, text: str = "good") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(text)
    (folder / "adapter_config.json").write_text("{}")


def test_a_watched_folder_is_read_once_its_files_are_at_rest(
    watched: tuple[FolderWatch, Served, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    watch, served, root, read = watched
    (root / "one").mkdir()
    (root / "one" / "adapter_model.safetensors").write_text("half")
    put(root / ".hidden")
    for _ in range(3):  # its config is not there
        look(watch, served)
    assert read == []
    put(root / "one")
    look(watch, served)
    assert read == []  # it may still be written
    look(watch, served)
    look(watch, served)
    assert read == ["one: good"] and models(served) == ["base", "a", "one"]
    assert "adapter one: loaded from" in capsys.readouterr().err
    put(root / "one", "better")
    look(watch, served)
    look(watch, served)
    assert read[1:] == ["one: better"] and models(served) == ["base", "a", "one"]
    shutil.rmtree(root / "one")
    look(watch, served)
    assert models(served) == ["base", "a"]
    assert "one" not in served.backend.adapters.known
    shutil.rmtree(root)
    for _ in range(2):
        look(watch, served)
    assert capsys.readouterr().err.count("No such file or directory") == 1


def test_a_failed_load_is_reported_once_and_retried(
    watched: tuple[FolderWatch, Served, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    watch, served, root, read = watched
    put(root / "one", "broken")
    put(root / "a")  # the name of another adapter
    for _ in range(4):
        look(watch, served)
    stderr = capsys.readouterr().err
    assert stderr.count("adapter one: not loaded: broken: not whole") == 1
    assert stderr.count("adapter a: not loaded: there is a model a already") == 1
    assert read == ["one: broken"] and models(served) == ["base", "a"]
    put(root / "one")
    look(watch, served)
    look(watch, served)
    assert models(served) == ["base", "a", "one"]
    capsys.readouterr()
    put(root / "one", "half")  # what changes while it is read is read again
    for _ in range(4):
        look(watch, served)
    assert models(served) == ["base", "a", "one"] and read[-2:] == ["one: half", "one: other half"]
    assert capsys.readouterr().err.count("adapter one: loaded") == 1
    put(root / "one", "broken")  # what was loaded stays
    for _ in range(3):
        look(watch, served)
    assert models(served) == ["base", "a", "one"]
    answer = served.client.completions.create(model="one", prompt="x", max_tokens=3)
    assert answer.model == "one"


def test_a_client_may_unload_what_was_watched(
    watched: tuple[FolderWatch, Served, Path, list[str]],
) -> None:
    watch, served, root, _ = watched
    served.server.open_adapter = lambda name, folder: lambda: None
    put(root / "one")
    for _ in range(2):
        look(watch, served)
    assert call(served, UNLOAD, {"lora_name": "one"})[0] == 200
    look(watch, served)
    assert models(served) == ["base", "a"]
    put(root / "one", "newer")
    for _ in range(2):
        look(watch, served)
    assert models(served) == ["base", "a", "one"]


def test_a_finetuned_adapter_is_served_at_once(launch: Launch, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello", "completion": " the the"}\n')
    outside = tmp_path / "outside"
    write_adapter(outside, 1)
    _, url = launch("model=tiny.gguf", "serve.watch_adapters=adapters", "serve.max_lora_rank=4")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    base = client.models.list().data[0].id
    (tmp_path / "adapters" / "link").symlink_to(outside)
    asked: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 5, "logprobs": 0}

    def answered(model: str) -> tuple[str, list[float]]:
        choice = client.completions.create(model=model, **asked).choices[0]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        return choice.text, choice.logprobs.token_logprobs

    before = answered(base)
    folder = tmp_path / "adapters" / "trained"
    trained = ["run_mode=finetune", f"model={tmp_path}/tiny.gguf", "finetune.lora.r=4"]
    trained += [f"finetune.data={tmp_path}/data.jsonl", f"output_dir={tmp_path}/runs"]
    trained += ["finetune.steps=3", "finetune.learning_rate=0.05", "verbosity=0"]
    trained += ["finetune.lora.targets=all-linear", f"finetune_output={folder}"]
    assert main([*trained, "finetune.charts=false"]) == 0
    while [card.id for card in client.models.list().data] != [base, "trained"]:
        time.sleep(0.05)
    after = answered("trained")
    text, _ = after
    assert after != before and answered(base) == before
    with LLM(tmp_path / "tiny.gguf", adapter_path=str(folder), output_dir=str(tmp_path)) as alone:
        assert alone.generate("hello", max_new_tokens=5, do_sample=False)[0].text == text
    # Written over in place while it is served.
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert answered("trained") == after
    shutil.rmtree(folder)
    while [card.id for card in client.models.list().data] != [base]:
        time.sleep(0.05)


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
