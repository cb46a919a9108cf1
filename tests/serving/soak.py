"""Many clients at once, well behaved and not: `python -m tests.serving.soak` (make soak).

Every answer must be the one that the request gets alone; nothing may be left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.doc_folder import write_adapter
from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf

UNREAD = 6  # streams that are opened and never read, at a time
MALFORMED: list[Any] = [
    b"{",
    b"[]",
    b'{"prompt": "x", "max_tokens": -1}',
    {"prompt": "x", "ghost": 1},
    {"prompt": "x", "model": "ghost"},
    {"prompt": []},
    {"prompt": "x", "guided_regex": "("},
    {"prompt": "x", "max_tokens": 10**6},
]
OTHERS: list[tuple[str, Any]] = [  # path, and body of a POST
    *((path, None) for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/")),
    ("/tokenize", {"prompt": "the text"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "the text"}]}),
    ("/detokenize", {"tokens": [97, 98]}),
    ("/v1/responses", {"input": "the text", "max_output_tokens": 9}),
    ("/v1/responses/input_tokens", {"input": "the text"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
]
VECTORS = ("/v1/embeddings", {"input": ["the text", "a text"]})  # of a real model alone


@dataclass
class Soak:
    """Requests of every kind to one server."""

    url: str
    models: list[str]
    seed: int = 0
    longest: int = 60  # tokens of a prompt, and of an answer
    comes: str | None = None  # folder of an adapter that comes and goes under one name or another
    alone: dict[str, str] = field(default_factory=dict)  # answer by body
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._bodies = [self._body(number) for number in range(32)]
        self._unread: list[Any] = []

    async def run(self, requests: int, clients: int) -> None:
        """Send so many. Raises AssertionError for a wrong answer."""
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            for body in self._bodies:
                if (key := json.dumps(body)) not in self.alone:
                    self.alone[key] = await self._whole(http, body)
            numbers = iter(range(requests))

            async def client() -> None:
                for number in numbers:
                    await self._one(http, number)

            await asyncio.gather(*(client() for _ in range(clients)))
            await self._close_unread(0)

    def _body(self, number: int) -> dict[str, Any]:
        draw = self._random
        length = draw.randint(1, self.longest)
        body: dict[str, Any] = {
            "model": self.models[number % len(self.models)],
            "prompt": [draw.randint(97, 122) for _ in range(length)],
            "max_tokens": draw.randint(1, self.longest),
            "seed": number,
            "temperature": draw.choice([0, 1.5]),
        }
        if number % 8 == 7:
            body["guided_regex"] = "[a-z]{3,9}!"
        elif number % 8 == 5:
            body |= {"logprobs": 2, "echo": True}
        elif number % 4 == 2:
            text = "".join(map(chr, body.pop("prompt")))
            body["messages"] = [{"role": "user", "content": text}]
        return body

    async def _one(self, http: httpx2.AsyncClient, number: int) -> None:
        body = self._random.choice(self._bodies)
        if number % 10 == 3:
            await self._malformed(http)
        elif number % 25 == 4:
            await self._other(http)
        elif number % 100 == 9 and self.comes is not None:
            await self._adapter(http, f"{self.comes}-{number % 700}", body)
        elif number % 5 == 1:
            await self._leaving(http, body)
        elif number % 50 == 7:
            await self._never_read(http, body)
        elif number % 2:
            assert await self._whole(http, body) == self.alone[json.dumps(body)]
        else:
            assert await self._streamed(http, body) == self.alone[json.dumps(body)]

    async def _whole(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> str:
        while (answer := await http.post(path_of(body), json=body)).status_code == 429:
            self.done["full"] += 1
            await asyncio.sleep(0.05)
        assert answer.status_code == 200, answer.text
        self.done["whole"] += 1
        choice = answer.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    async def _streamed(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> str:
        while True:
            text, ended = "", False
            body = {**body, "stream": True}
            async with http.stream("POST", path_of(body), json=body) as answer:
                if answer.status_code == 429:
                    self.done["full"] += 1
                    await asyncio.sleep(0.05)
                    continue
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    ended = ended or line == "data: [DONE]"
                    if line and not ended:
                        choice = json.loads(line.removeprefix("data: "))["choices"][0]
                        delta = choice.get("delta", {}).get("content", "")
                        text += choice.get("text", delta)
            assert ended
            self.done["streamed"] += 1
            return text

    async def _leaving(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        """Leave before the answer begins, or in the middle of it."""
        body = {**body, "stream": True}
        try:
            if self._random.random() < 0.5:
                await asyncio.wait_for(http.post(path_of(body), json=body), 0.003)
            async with http.stream("POST", path_of(body), json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
        except asyncio.TimeoutError:
            pass
        self.done["left"] += 1

    async def _other(self, http: httpx2.AsyncClient) -> None:
        path, body = self._random.choice([*OTHERS, *([VECTORS] if self.comes else [])])
        answer = await (http.get(path) if body is None else http.post(path, json=body))
        assert answer.status_code in (200, 429), (path, answer.text)
        self.done["other"] += 1

    async def _adapter(self, http: httpx2.AsyncClient, name: str, body: dict[str, Any]) -> None:
        """An adapter comes, answers and goes; unless it is there already."""
        adapter = {"lora_name": name, "lora_path": self.comes}
        answer = await http.post("/v1/load_lora_adapter", json=adapter)
        if answer.status_code == 200:
            await self._whole(http, {**body, "model": name})
            answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert answer.status_code == 200, answer.text
            self.done["adapter"] += 1

    async def _malformed(self, http: httpx2.AsyncClient) -> None:
        body = self._random.choice(MALFORMED)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code in (400, 404) and "error" in answer.json()
        self.done["malformed"] += 1

    async def _never_read(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        opened = http.stream("POST", path_of(body), json={**body, "stream": True})
        await opened.__aenter__()
        self._unread.append(opened)
        self.done["unread"] += 1
        await self._close_unread(UNREAD)

    async def _close_unread(self, most: int) -> None:
        while len(self._unread) > most:
            await self._unread.pop(0).__aexit__(None, None, None)


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def main() -> None:
    """The long form, on a server of its own; tells how its memory goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sizes = _soak(Path(name), given)
    # The first requests fill caches and the allocator's pools.
    warm, last = sizes[given.rounds // 10], sizes[-1]
    requests = given.requests * (given.rounds - given.rounds // 10 - 1) / given.rounds
    grown = (last - warm) * 2**10 / max(1, requests)
    print(f"memory: {grown:.2f} KiB a request")
    if last > 1.03 * warm:
        sys.exit(f"memory grows: {warm:.1f} MiB, and {last:.1f} MiB at the end")


def _soak(folder: Path, given: argparse.Namespace) -> list[float]:
    write_tiny_gguf(folder / "tiny.gguf")
    adapters = [f"a{number}" for number in range(4)]
    for number, name in enumerate(adapters):
        write_adapter(folder / name, number)
    (folder / "lora_adapter.json").write_text(json.dumps({name: name for name in adapters}))
    command = [sys.executable, str(ROOT / "run_lite.py"), "run_mode=serve", "model=tiny.gguf"]
    command += ["serve.port=0", "adapter_path=lora_adapter.json", "max_loaded_adapters=2"]
    command += ["serve.load_adapters=true", "adapter_root=."]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"on (http://\S+)", one) for one in process.stderr)))
        threading.Thread(target=lambda: deque(process.stderr or (), 0), daemon=True).start()
        listed = httpx2.get(f"{found[1]}/v1/models").json()["data"]
        soak = Soak(found[1], [card["id"] for card in listed], given.seed, comes=adapters[0])
        server = psutil.Process(process.pid)
        sizes = []
        for round in range(given.rounds):
            asyncio.run(soak.run(given.requests // given.rounds, given.clients))
            sizes.append(server.memory_info().rss / 2**20)
            kinds = " ".join(f"{kind}={count}" for kind, count in sorted(soak.done.items()))
            print(
                f"round {round + 1}: {sizes[-1]:.1f} MiB, {server.num_threads()} threads, {kinds}"
            )
        until_idle(found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        return sizes
    finally:
        process.kill()
        process.wait()


def until_idle(url: str) -> None:
    """Wait until no sequence is left."""
    waits = r"^vllm:num_requests_(running|waiting)\{.*\} (?!0\.0$)"
    while re.search(waits, httpx2.get(f"{url}/metrics").text, re.MULTILINE):
        time.sleep(0.05)


if __name__ == "__main__":
    main()
