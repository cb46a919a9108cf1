"""Batch files: answers a line, resumed after a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lite_runner import app
from lite_runner.serving import batches
from lite_runner.serving.batches import answered
from tests.paths import ROOT
from tests.serving.conftest import Launch

WORDS = ("run_mode=serve", "model=tiny_llama", "seed=1", "serve.batch=requests.jsonl")
PROMPT: dict[str, Any] = {"model": "tiny_llama", "prompt": "One, two,", "temperature": 0}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(*lines: Any) -> None:
    texts = (one if isinstance(one, str) else json.dumps(one) for one in lines)
    Path("requests.jsonl").write_text("\n".join(texts))


def run(*words: str) -> int:
    return app.main([*WORDS, "verbosity=0", *words])


def answers(path: str = "requests_output.jsonl") -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_each_request_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is refused too, and those that wait for a slot, or for all that wait: `wide`
    runs where nothing else does, `many` never."""
    texts = [request(f"text {place}", **PROMPT, max_tokens=3) for place in range(20)]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    wide = {**PROMPT, "temperature": 1, "max_tokens": 3, "n": 3}
    many = request("many", **{**PROMPT, "prompt": ["One,"] * 4})
    with monkeypatch.context() as patched:
        patched.setattr(batches, "_RETRY_S", None)  # alone it is not asked again
        write(many)
        assert run("serve.max_running=2", "serve.max_queue=1") == 0
        assert answers()["many"]["status_code"] == 429
    write(
        *texts[:4],
        *(request(f"wide {place}", **wide) for place in range(3)),
        many,
        *texts[4:],
        request("vector", "/v1/embeddings", input="a red apple", dimensions=3),
        "",
        request("chat", "/v1/chat/completions", **chat),
        request("strange", **PROMPT, wheels=4),
        request("\u00e9", **{**PROMPT, "model": "gpt-4"}),
    )
    assert run("serve.max_running=2", "serve.max_queue=1", "serve.batch_output=found.jsonl") == 0
    found = answers("found.jsonl")
    assert len(found) == 28
    assert {found[f"text {place}"]["status_code"] for place in range(20)} == {200}
    assert {found[f"wide {place}"]["status_code"] for place in range(3)} == {200}
    assert found["many"]["status_code"] == 429
    assert json.loads(Path("outputs/latest/result.json").read_text())["run_mode"] == "serve"
    texts = [found[f"text {place}"]["body"]["choices"][0]["text"] for place in range(20)]
    assert len(set(texts)) == 1
    assert len(found["vector"]["body"]["data"][0]["embedding"]) == 3
    assert "has no chat template" in found["chat"]["body"]["error"]["message"]
    assert found["strange"]["body"]["error"]["param"] == "wheels"
    assert found["\u00e9"]["status_code"] == 404
    line = json.loads(Path("found.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"id", "custom_id", "response", "error"} and line["error"] is None
    assert line["response"].keys() == {"status_code", "request_id", "body"}


def test_a_killed_batch_goes_on() -> None:
    write(*(request(str(place), **PROMPT, max_tokens=100 + place) for place in range(40)))
    process = subprocess.Popen(
        [sys.executable, ROOT / "run_lite.py", *WORDS, "serve.max_running=1", "verbosity=0"]
    )
    output = Path("requests_output.jsonl")
    while not output.exists() or output.stat().st_size < 1500:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = answered(output)
    assert 0 < len(before) < 40
    whole = output.read_bytes().rpartition(b"\n")[0] + b"\n"
    output.write_bytes(whole + whole.splitlines()[0][:70])  # one was being written
    assert run() == 0
    assert output.read_bytes().startswith(whole)
    found = answers()
    assert found.keys() == {str(place) for place in range(40)}
    used = [one["body"]["usage"]["completion_tokens"] for _, one in sorted(found.items())]
    assert all(1 <= one <= 140 for one in used)
    assert run() == 0 and answers() == found


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        ([], "has no requests"),
        (["{"], r"requests.jsonl:1: the body is not valid JSON"),
        (["", request("a", "/v1/models")], r"requests.jsonl:2: url: .*'/v1/chat/completions'"),
        ([request("a"), request("b"), request("a")], ":3: custom_id: the same as in line 1"),
        ([request("a", stream=True)], ":1: body.stream: not available in a batch"),
        ([{"method": "POST", "url": "/v1/completions", "body": {}}], ":1: custom_id: missing"),
        (["{}"] * 15, r"and 5 more"),
    ],
)
def test_wrong_lines(capsys: pytest.CaptureFixture[str], lines: list[Any], pattern: str) -> None:
    """All at once, before a model is loaded."""
    write(*lines)
    assert run() == 2
    assert re.search(pattern, capsys.readouterr().err)
    assert not Path("requests_output.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes", "requests_output.jsonl:1: not an answer of a batch"),
        (
            '{"id":"batch_req_1","custom_id":"b","response":{},"error":null}\n',
            "requests_output.jsonl answers 'b', which is not in requests.jsonl",
        ),
    ],
)
def test_other_files_are_not_appended_to(
    capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    write(request("a", **PROMPT))
    Path("requests_output.jsonl").write_text(content)
    assert run() == 2
    err = capsys.readouterr().err
    assert message in err and "serve.batch_output=FILE names another file" in err
    assert Path("requests_output.jsonl").read_text() == content


def test_errors_of_batch_settings(capsys: pytest.CaptureFixture[str]) -> None:
    write(request("a", **PROMPT))
    assert app.main(["model=tiny_llama", "predict_data=requests.jsonl"]) == 2
    assert "-> run_mode=serve serve.batch=requests.jsonl" in capsys.readouterr().err
    assert app.main([*WORDS, "serve.engine=ray"]) == 2
    assert "serve.batch needs serve.engine=local" in capsys.readouterr().err
    assert app.main([*WORDS[:3], "serve.batch_output=x.jsonl"]) == 2
    assert "serve.batch_output needs serve.batch=FILE" in capsys.readouterr().err
    assert run("serve.batch=missing.jsonl") == 2
    assert "missing.jsonl: No such file" in capsys.readouterr().err


def test_a_log_of_requests_is_replayed(launch: Launch) -> None:
    """Sampled, streamed and of all protocols: the answers are the same again."""
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    Path("chat.jinja").write_text(template)
    words = ("processor.tokenizer.chat_template=chat.jinja", "max_new_tokens=5")
    _, url = launch("serve.request_log=log.jsonl", *words)

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx2.post(f"{url}{path}", json=body, headers={"X-Request-Id": "mine"})
        if not body.get("stream"):
            found: dict[str, Any] = answer.json()
            return found
        events = [one.removeprefix("data: ") for one in answer.text.split("\n\n")]
        pieces = [json.loads(one)["choices"] for one in events if one.startswith("{")]
        text = "".join(choice["delta"].get("content", "") for one in pieces for choice in one)
        return {"choices": [{"message": {"content": text}}]}

    chat = [{"role": "user", "content": "hi"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ["One,", "two"], "n": 2}),
        ("/v1/chat/completions", {"messages": chat, "stream": True}),
        ("/v1/messages", {"messages": chat, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": "x", "wheels": 4}),
    ]
    replies = [ask(*one) for one in asked]
    replies.append(ask("/v1/responses", {"input": "so?", "previous_response_id": replies[3]["id"]}))
    assert httpx2.post(f"{url}/v1/completions", content=b"{").status_code == 415
    log = Path("log.jsonl")
    assert log.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(one) for one in log.read_text().splitlines()]
    assert [one["url"] for one in lines] == [*(path for path, _ in asked), "/v1/responses"]
    assert "stream" not in lines[1]["body"] and isinstance(lines[1]["body"]["seed"], int)
    assert run("serve.batch=log.jsonl", *words) == 0
    found = answers("log_output.jsonl")

    def texts_of(answer: dict[str, Any]) -> list[str]:
        if "choices" in answer:
            choices = answer["choices"]
            return [one["text"] if "text" in one else one["message"]["content"] for one in choices]
        if answer.get("error"):
            return [answer["error"]["message"]]
        messages = answer.get("output", [answer])
        return [block["text"] for one in messages for block in one["content"]]

    for line, answer in zip(lines, replies, strict=True):
        assert line["custom_id"].startswith("mine-")
        assert texts_of(found[line["custom_id"]]["body"]) == texts_of(answer)
