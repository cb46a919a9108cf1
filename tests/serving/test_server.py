"""run_mode=serve from the command line: start, signals, and what it refuses to begin with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from lite_runner.errors import EnvironmentFault
from lite_runner.serving.server import KEEP_ALIVE_S, listen
from tests.serving.conftest import Launch

SCHEMA = json.loads(
    '{"type": "object", "required": ["city", "days", "by_train"], "additionalProperties": false,'
    ' "properties": {"city": {"enum": ["Oslo", "Rome"]}, "by_train": {"type": "boolean"},'
    ' "days": {"type": "integer", "minimum": 1, "maximum": 30}}}'
)


def test_it_serves_and_ends_with_what_runs(launch: Launch, tmp_path: Path) -> None:
    process, url = launch()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="tiny_llama",
        prompt="hello",
        max_tokens=40,
        stream=True,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    os.kill(process.pid, signal.SIGTERM)
    rest = list(chunks)
    assert rest[-1].choices[0].finish_reason == "length"
    assert process.wait(60) == 0
    log = next((tmp_path / "outputs").glob("*/*serve*/run.log"))
    assert "POST path=/v1/completions status=200" in log.read_text()


class Trip(BaseModel):
    """What a client wants to know."""

    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=30)]
    by_train: bool


def test_structured_output(launch: Launch) -> None:
    _, url = launch("model.model_config.seq_length=1024")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for seed in range(3):
        asked = {"model": "tiny_llama", "prompt": "x", "seed": seed, "temperature": 5}
        form = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
        answer = client.completions.create(
            **asked, max_tokens=500, extra_body={"response_format": form}
        )
        Trip.model_validate_json(answer.choices[0].text)


def test_ctrl_c_twice_ends_at_once(launch: Launch) -> None:
    process, url = launch("serve.drain_timeout=600", "model.model_config.seq_length=8192")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    streams = [
        client.completions.create(
            model="tiny_llama",
            prompt="hello",
            max_tokens=8000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:
        if "ending: " in line:
            break
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 0


def test_idle_connections_are_kept_longer_than_clients_keep_them() -> None:
    # Else a request may go into a connection that the server is closing: it is reset.
    assert KEEP_ALIVE_S > 2 * (openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 0) > 0


def test_others_may_come_only_with_a_key(cli: Callable[..., object]) -> None:
    found = cli("run_mode=serve", "model=tiny_llama", "serve.host=0.0.0.0")
    assert found.returncode == 2 and "needs serve.api_key=env:NAME" in found.stderr


@pytest.mark.parametrize("key", ["num_beams=2", "adapter_id=a", "max_length=9", "logprobs=1"])
def test_what_requests_say_is_no_key_of_the_server(cli: Callable[..., object], key: str) -> None:
    found = cli("run_mode=serve", "model=tiny_llama", key)
    assert found.returncode == 2 and "has no effect with run_mode=serve" in found.stderr


def test_the_plan_of_a_server(cli: Callable[..., object]) -> None:
    found = cli("run_mode=serve", "model=smollm2_135m", "dry_run=true", "serve.max_running=3")
    assert found.returncode == 0, found.stderr
    assert "for 3 x 8192 tokens" in found.stdout
    found = cli("run_mode=serve", "model=tiny_llama", "serve.max_length=100000")
    assert found.returncode == 2 and "serve.max_length: got 100000" in found.stderr


def test_a_port_that_is_taken() -> None:
    taken = pytest.raises(EnvironmentFault, match=r"serve\.port=\d+: Address already in use")
    with closing(listen("127.0.0.1", 0)) as bound, taken:
        listen("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(EnvironmentFault, match=r"serve\.host=no\.such\.host"):
        listen("no.such.host.invalid", 0)
    with closing(listen("localhost", 0)) as one:
        assert one.getsockname()[1] > 0
