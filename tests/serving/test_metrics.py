"""Metrics: the queries of the Grafana dashboard, and requests by key."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

from lite_runner.errors import ConfigError
from lite_runner.serving.listening import listen
from lite_runner.system.secret import named_keys
from tests.paths import ROOT
from tests.serving.conftest import Launch, Start
from tests.serving.test_app import call

NAMES = re.compile(r"\b(?:vllm|lite_runner|process)[:_][\w:]+")
LABELS = re.compile(r"by \((\w+)\)|\{(\w+)=")
BOARD = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_there_is(start: Start) -> None:
    served = start(key=b"alice one\nbob two")
    body = {"prompt": "hello", "max_tokens": 3}
    assert call(served, "/v1/completions", body, authorization="Bearer one")[0] == 200
    assert call(served, "/v1/completions", {}, authorization="Bearer one")[0] == 400
    text = call(served, "/metrics", authorization="Bearer two")[2].decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = {re.split(r"[{ ]", line)[0] for line in lines}
    labels = set(re.findall(r"(\w+)=\"", text))
    variables = [one["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    assert len(QUERIES) > 12 and variables
    for query in [*QUERIES, *variables]:
        assert NAMES.search(query) and set(NAMES.findall(query)) <= names, query
        assert {one for pair in LABELS.findall(query) for one in pair if one} <= labels, query


@pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus: apt install prometheus")
def test_prometheus_answers_what_the_dashboard_asks(launch: Launch, tmp_path: Path) -> None:
    """With deploy/prometheus.yml, but for the server's address, its key and how often it asks."""
    key, config = tmp_path / "key", tmp_path / "prometheus.yml"
    key.write_text("0123456789abcdef")
    _, url = launch(f"serve.api_key={key}", "serve.model_name=tiny")
    text = (ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8")
    changes = {"/run/secrets/key": str(key), "lite-runner:8000": url.removeprefix("http://")}
    for old, new in {**changes, "10s": "1s"}.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    bound = listen("127.0.0.1", 0)
    address = f"127.0.0.1:{bound.getsockname()[1]}"
    bound.close()
    words = ["prometheus", f"--config.file={config}", f"--web.listen-address={address}"]
    process = subprocess.Popen([*words, f"--storage.tsdb.path={tmp_path / 'stored'}"])
    waiting, ends = set(QUERIES), time.monotonic() + 60
    try:
        while waiting:
            assert time.monotonic() < ends, waiting
            for prompt, status in (([97, 98, 99] * 20, 200), ([], 400)):
                asked = {"prompt": prompt, "max_tokens": 4}
                headers = {"Authorization": f"Bearer {key.read_text()}"}
                answer = httpx2.post(f"{url}/v1/completions", json=asked, headers=headers)
                assert answer.status_code == status
            time.sleep(0.5)
            waiting = {query for query in waiting if not answered(address, query)}
    finally:
        process.terminate()
        process.wait()


def answered(address: str, query: str) -> bool:
    """True if Prometheus has a number for a query with Grafana's variables in it."""
    asked = query.replace("$model", "tiny").replace("$__rate_interval", "30s")
    try:
        answer = httpx2.get(f"http://{address}/api/v1/query", params={"query": asked})
    except httpx2.ConnectError:
        return False  # it starts
    if answer.status_code == 503:
        return False  # it reads what it has stored
    found = answer.json()["data"]["result"]
    return any(one["value"][1] != "NaN" for one in found)


def test_requests_by_the_name_of_their_key(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    served = start(key=b"alice secret-one\n\nbob secret-two\n")
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    for key, status in (("secret-one", 200), ("secret-two", 200), ("alice", 401), ("", 401)):
        assert call(served, "/v1/completions", body, x_api_key=key)[0] == status
    text = call(served, "/metrics", x_api_key="secret-one")[2].decode()
    for line in (
        'lite_runner:requests_by_key_total{key="alice"} 1.0',
        'lite_runner:prompt_tokens_by_key_total{key="bob"} 5.0',
        'lite_runner:generation_tokens_by_key_total{key="bob"} 3.0',
    ):
        assert f"\n{line}\n" in text
    stderr = capfd.readouterr().err
    assert "secret" not in text + stderr and "alice" not in stderr


def test_keys_and_their_names() -> None:
    assert named_keys(None) == {}
    assert named_keys(b"xyz=\n") == {"default": b"xyz="}
    assert named_keys(b"alice xyz\n bob  def=\n") == {"alice": b"xyz", "bob": b"def="}
    assert named_keys(b"a phrase with spaces") == {"default": b"a phrase with spaces"}
    for given in (b"alice xyz\ndef", b"alice xyz\nbob xyz", b"a 1\na 2", b"a b c\nd e", b"a\nb"):
        with pytest.raises(ConfigError) as raised:
            named_keys(given)
        assert "xyz" not in str(raised.value)
