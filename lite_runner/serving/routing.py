"""Routing to replicas: the one with the request's prefix in its cache, unless it is busy. No state:
each replica has a weight that is a hash of its name and the beginning (rendezvous hashing), so that
all requests of a conversation prefer the same one, and those of one that is gone are divided among
the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from lite_runner.serving.middleware import check_values
from lite_runner.system.files import parse_json

AHEAD = 4  # requests that a preferred replica may have more than the least busy one
_MOST = 1024  # characters of a beginning, or tokens
_PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}


def key_of_body(path: str, body: bytes, adapters: Collection[str]) -> bytes:
    """The routing key of a request. Raises ApiError for a body of too many values."""
    check_values(body)
    try:
        return key_of_prompt(path, parse_json(body), adapters)
    except ValueError:
        return b""  # the application says what is wrong with it


def key_of_prompt(path: str, body: Any, adapters: Collection[str]) -> bytes:
    """The key that prefers a replica: the adapter, which is loaded there, or the beginning of
    the prompt, of a conversation that of its first message by a user; b"": neither."""
    if not isinstance(body, dict):
        return b""  # the application says what is wrong with it
    named = body.get("model")
    if isinstance(named, str) and named in adapters:
        return named.encode()
    prompt = body.get(_PROMPTS.get(path, ""))
    for one in prompt if isinstance(prompt, list) else ():
        if isinstance(one, dict) and one.get("role") == "user":
            prompt = one.get("content")
            break
    return json.dumps(prompt[:_MOST]).encode() if isinstance(prompt, (str, list)) else b""


def ranked(key: bytes, running: Mapping[str, int]) -> list[str]:
    """Replicas in the order in which they are asked: the preferred one, unless it has many more
    requests than another, and then the least busy. `running`: requests of each."""
    salt = key or os.urandom(8)

    def weight(name: str) -> bytes:
        return hashlib.blake2b(salt + b"\0" + name.encode(), digest_size=8).digest()

    order = sorted(running, key=lambda name: (running[name], weight(name)))
    if key:
        home = min(order, key=weight, default="")
        if home and running[home] <= running[order[0]] + AHEAD:
            order.remove(home)
            order.insert(0, home)
    return order
