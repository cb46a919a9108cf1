"""A server over a mock backend, in a thread of this process."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import uvicorn
from numpy.typing import NDArray
from tokenizers import AddedToken

from lite_runner.config.generation import GenerationConfig
from lite_runner.model.embedding import EmbeddingConfig
from lite_runner.serving.app import application
from lite_runner.serving.engine import EngineThread, Output, Put
from lite_runner.serving.listening import listen
from lite_runner.serving.metrics import Metrics
from lite_runner.serving.middleware import Connection
from lite_runner.serving.options import Serve
from lite_runner.serving.state import Server
from lite_runner.text.chatglm_chat import PREFIX, ROLES, role_tag
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer, byte_tokenizer
from tests.generation.mock import MockBackend
from tests.paths import ROOT

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VOCAB, END = 259, 257
TAGS = [role_tag(role) for role in ROLES]


def letters(history: list[int], adapter: int) -> NDArray[np.float32]:
    """Logits by the history; the likely tokens are letters, and sometimes the end."""
    random = np.random.default_rng([adapter, len(history), *history])
    scores = np.full(VOCAB, -50, np.float32)
    scores[97:123] = random.normal(scale=2.0, size=26)
    scores[END] = random.normal() - 3
    return scores


@cache
def unencrypted() -> ssl.SSLContext:
    """The context that clients make each time, from all certificates, in 26 ms of a
    processor; these servers speak plain HTTP."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass
class Served:
    """A running server."""

    url: str
    server: Server
    backend: Any
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=unencrypted()),
        )

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=unencrypted()),
        )

    def until_idle(self) -> None:
        """Wait until nothing runs."""
        while not self.server.engine.idle:
            time.sleep(0.005)


SETTINGS = Serve(
    engine="local",
    replicas=1,
    models=(),
    memory=None,
    load_timeout=60,
    batch="",
    batch_output="",
    host="127.0.0.1",
    port=0,
    api_key="",
    requests_per_minute=None,
    tokens_per_minute=None,
    tls_cert="",
    tls_key="",
    model_name=None,
    allowed_hosts=(),
    cors_origins=(),
    max_running=4,
    max_queue=64,
    priority=True,
    max_length=None,
    token_budget=None,
    tool_parser="auto",
    pooling="auto",
    load_adapters=False,
    watch_adapters="",
    max_lora_rank=None,
    request_timeout=60,
    drain_delay=0,
    drain_timeout=5,
    log_format="text",
    request_log="",
)
Start = Callable[..., Served]
Launch = Callable[..., tuple["subprocess.Popen[str]", str]]
SERVE = ("run_mode=serve", "serve.port=0", "seed=1")


def tokenizer_with_chat(template: str = TEMPLATE, special: Sequence[str] = ()) -> Tokenizer:
    """The byte tokenizer, with more special tokens."""
    tokenizer = byte_tokenizer().with_special(chat_template=template)
    if not special:
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"])
    backend.add_special_tokens([AddedToken(one, special=True) for one in special])
    named = SpecialTokens(bos="<s>", eos=("</s>",), pad="<pad>")
    return Tokenizer(backend, named, source="a test's tokenizer", chat_template=template)


def tokenizer_of_chatglm3() -> Tokenizer:
    """The byte tokenizer with the tags of ChatGLM3, and its chats."""
    named = SpecialTokens(bos="<s>", eos=("</s>",), pad="<pad>")
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().files()["tokenizer.json"])
    backend.add_special_tokens([AddedToken(one, special=True) for one in (*PREFIX, *TAGS)])
    return Tokenizer(backend, named, source="a test's tokenizer", chat_form="chatglm3")


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(backend, key=b"...", max_queue=2)`: a server over a backend, ended with the test."""
    ends: list[Callable[[], None]] = []

    def run(
        backend: Any = None,
        key: bytes | None = None,
        tokenizer: Tokenizer | None = None,
        defaults: GenerationConfig = GenerationConfig(do_sample=True, eos_token_id=(END,)),  # noqa: B008
        *,
        speculate: bool = False,
        embedding: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008
        **settings: Any,
    ) -> Served:
        backend = backend or MockBackend(letters, 4, 256, 4)
        tokenizer = tokenizer or tokenizer_with_chat()
        loop = asyncio.new_event_loop()

        def post(outputs: Sequence[tuple[Put, Output]]) -> None:
            loop.call_soon_threadsafe(lambda: [put(output) for put, output in outputs])

        chosen = replace(SETTINGS, **settings)
        engine = EngineThread(
            backend,
            tokenizer,
            token_budget=chosen.token_budget,
            prefix_cache=True,
            speculate=speculate,
            max_queue=chosen.max_queue,
            post=post,
        )
        server = Server(
            engine,
            tokenizer,
            chosen.names or ("base",),
            ("a", "b"),
            defaults,
            chosen,
            key,
            Metrics("base", lambda: engine.load),
            embedding=embedding,
        )
        bound = listen("127.0.0.1", 0)
        config = uvicorn.Config(
            application(server), log_config=None, access_log=False, http=Connection
        )
        http = uvicorn.Server(config)
        thread = threading.Thread(
            target=lambda: loop.run_until_complete(http.serve([bound])), daemon=True
        )
        engine.start()
        thread.start()
        while not http.started:
            time.sleep(0.005)

        def end() -> None:
            http.should_exit = True
            engine.close()
            thread.join()
            loop.close()
            bound.close()

        ends.append(end)
        return Served(
            f"http://127.0.0.1:{bound.getsockname()[1]}", server, backend, tokenizer, loop
        )

    yield run
    for end in ends:
        end()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """`launch("serve.max_queue=2")`: a server of a tiny model in a process, and its address."""
    processes = []

    def run(*arguments: str, model: str | None = "tiny_llama") -> tuple[subprocess.Popen[str], str]:
        named = [] if model is None else [f"model={model}"]
        process = subprocess.Popen(
            [sys.executable, ROOT / "run_lite.py", *SERVE, *named, *arguments],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"serving .+ on (https?://\S+)", line):
                return process, found[1]
        raise AssertionError(f"it ended with {process.wait()}")

    yield run
    for process in processes:
        process.kill()
        process.communicate()
