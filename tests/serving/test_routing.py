"""Routing of requests to replicas."""

from __future__ import annotations

from typing import Any

import pytest

from lite_runner.serving.routing import AHEAD, key_of_body, key_of_prompt, ranked

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "Be brief. " * 500}
ASKED = {"role": "user", "content": "What is a lighthouse?"}


def key(path: str, **body: Any) -> bytes:
    return key_of_prompt(path, body, ("pirate",))


def test_all_turns_of_a_conversation_have_one_key() -> None:
    turns = [SYSTEM, ASKED, {"role": "assistant", "content": "A tower."}, {"role": "user"}]
    first = key(CHAT, messages=turns[:2])
    assert first and key(CHAT, messages=turns) == first
    assert key("/v1/messages", messages=turns[1:]) == key("/v1/responses", input=turns) == first
    assert key("/v1/responses", input=ASKED["content"]) == first
    assert key(CHAT, messages=[SYSTEM, {"role": "user", "content": "And a mole?"}]) != first


@pytest.mark.parametrize("prompt", ["a long text " * 500, list(range(5000))])
def test_texts_that_begin_alike_have_one_key(prompt: Any) -> None:
    assert key(TEXT, prompt=prompt) == key(TEXT, prompt=prompt[:1500]) != key(TEXT, prompt="x")


def test_an_adapter_is_the_key_of_its_requests() -> None:
    assert key(TEXT, prompt="x", model="pirate") == key(CHAT, messages=[ASKED], model="pirate")
    assert key(TEXT, prompt="x", model="ghost") == key(TEXT, prompt="x")


@pytest.mark.parametrize(
    "body", [None, [], {}, {"messages": 1}, {"model": ["pirate"]}, {"messages": {"role": "user"}}]
)
def test_bodies_without_a_prompt_have_no_key(body: Any) -> None:
    assert key_of_prompt(CHAT, body, ("pirate",)) == b""
    assert key_of_prompt("/v1/embeddings", {"input": "x"}, ()) == b""


def test_a_body_is_json_or_has_no_key() -> None:
    assert key_of_body(TEXT, b'{"prompt": "x"}', ()) == key(TEXT, prompt="x")
    assert key_of_body(TEXT, b'{"prompt":', ()) == key_of_body(TEXT, b"", ()) == b""


def test_a_key_has_its_replica_whichever_others_there_are() -> None:
    names = [f"replica-{number}" for number in range(8)]
    keys = [b"%d" % number for number in range(800)]
    homes = {one: ranked(one, dict.fromkeys(names, 0))[0] for one in keys}
    shares = [list(homes.values()).count(name) for name in names]
    assert all(60 <= share <= 140 for share in shares)  # deterministic, as the hash is
    fewer = dict.fromkeys(names[1:], 0)
    for one, home in homes.items():
        assert home == names[0] or ranked(one, fewer)[0] == home


def test_a_busy_replica_is_passed_over_for_the_least_busy() -> None:
    home, *others = ranked(b"key", dict.fromkeys("abc", 0))
    assert ranked(b"key", {home: AHEAD, others[0]: 2, others[1]: 0}) == [home, others[1], others[0]]
    busy = ranked(b"key", {home: AHEAD + 1, others[0]: 2, others[1]: 0})
    assert busy == [others[1], others[0], home]


def test_without_a_key_the_least_busy_replica_is_asked() -> None:
    assert ranked(b"", {"a": 2, "b": 0, "c": 1}) == ["b", "c", "a"]
    assert {ranked(b"", {"a": 0, "b": 0})[0] for _ in range(100)} == {"a", "b"}
    assert ranked(b"", {}) == ranked(b"key", {}) == []
