"""Metrics: what the Grafana dashboard asks for, and requests by key."""

from __future__ import annotations

import json
import re

import pytest

from lite_runner.errors import ConfigError
from lite_runner.system.secret import named_keys
from tests.paths import ROOT
from tests.serving.conftest import Start
from tests.serving.test_app import call

NAMES = re.compile(r"\b(?:vllm|lite_runner|process)[:_][\w:]+")
LABELS = re.compile(r"by \((\w+)\)|\{(\w+)=")


def test_the_dashboard_asks_for_what_there_is(start: Start) -> None:
    served = start(key=b"alice one\nbob two")
    body = {"prompt": "hello", "max_tokens": 3}
    assert call(served, "/v1/completions", body, authorization="Bearer one")[0] == 200
    assert call(served, "/v1/completions", {}, authorization="Bearer one")[0] == 400
    text = call(served, "/metrics", authorization="Bearer two")[2].decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = {re.split(r"[{ ]", line)[0] for line in lines}
    labels = set(re.findall(r"(\w+)=\"", text))
    board = json.loads((ROOT / "deploy/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(queries) > 12
    for query in queries:
        assert NAMES.search(query) and set(NAMES.findall(query)) <= names, query
        assert {one for pair in LABELS.findall(query) for one in pair if one} <= labels, query


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
    said = capfd.readouterr().err
    assert "secret" not in text + said and "alice" not in said


def test_keys_and_their_names() -> None:
    assert named_keys(None) == {}
    assert named_keys(b"xyz=\n") == {"default": b"xyz="}
    assert named_keys(b"alice xyz\n bob  def=\n") == {"alice": b"xyz", "bob": b"def="}
    assert named_keys(b"a phrase with spaces") == {"default": b"a phrase with spaces"}
    for given in (b"alice xyz\ndef", b"alice xyz\nbob xyz", b"a 1\na 2", b"a b c\nd e", b"a\nb"):
        with pytest.raises(ConfigError) as raised:
            named_keys(given)
        assert "xyz" not in str(raised.value)
