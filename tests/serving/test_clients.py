"""Programs of others that speak to a server: lm-eval, LangChain, OpenAI's packages and agents,
Anthropic's package, LiteLLM's proxy, and llm-comply, which has the schemas of three protocols.

Their packages are an environment of their own, which `make clients` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lite_runner import app
from tests.conftest import NO_CLIENTS
from tests.paths import ROOT
from tests.serving.conftest import Launch
from tests.test_joined import free_port
from tests.tiny_gguf import write_tiny_gguf

PYTHON = ROOT / ".venv-clients/bin/python"
DATA = ROOT / "tests/fixtures/lm_eval"
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
LANGCHAIN = """
import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)

chat = ChatOpenAI(
    base_url=sys.argv[1], api_key="none", model=sys.argv[2], max_tokens=60, seed=1, temperature=2
)
whole = chat.invoke([("system", "be brief"), ("user", "hi")])
assert 0 < whole.usage_metadata["output_tokens"] <= 60, whole
streamed = "".join(chunk.text for chunk in chat.stream([("system", "be brief"), ("user", "hi")]))
assert streamed == whole.text, (streamed, whole)
trip = chat.with_structured_output(Trip, method="json_schema").invoke("where?")
assert isinstance(trip, Trip), trip
"""

RESPONSES = """
import sys
from typing import Literal

from openai import NotFoundError, OpenAI
from pydantic import BaseModel

class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]

client = OpenAI(base_url=sys.argv[1], api_key="none")
asked = {"model": sys.argv[2], "temperature": 0, "max_output_tokens": 20}
whole = client.responses.create(**asked, instructions="be brief", input="hi")
assert 0 < whole.usage.output_tokens <= 20 and whole.output_text, whole
with client.responses.stream(**asked, instructions="be brief", input="hi") as stream:
    streamed = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
assert streamed == whole.output_text
again = client.responses.create(**asked, input="so?", previous_response_id=whole.id)
assert again.usage.input_tokens > 2 and client.responses.retrieve(again.id) == again
trip = client.responses.parse(**asked, input="where?", text_format=Trip).output_parsed
assert isinstance(trip, Trip)
client.responses.delete(whole.id)
try:
    client.responses.retrieve(whole.id)
except NotFoundError as error:
    assert whole.id in error.body["message"]
else:
    raise AssertionError
"""

EMBEDDINGS = """
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
asked = {"model": sys.argv[2], "input": ["a red apple", "a green pear", "a red apple"]}
coded = client.embeddings.create(**asked)
plain = client.embeddings.create(**asked, encoding_format="float", dimensions=8)
first, second, third = (one.embedding for one in coded.data)
assert first == third != second and abs(sum(x * x for x in first) - 1) < 1e-5
short = [x / sum(y * y for y in first[:8]) ** 0.5 for x in first[:8]]
assert max(abs(x - y) for x, y in zip(short, plain.data[0].embedding, strict=True)) < 1e-5
assert coded.usage.total_tokens == plain.usage.total_tokens > 3
"""

ANTHROPIC = """
import sys

from anthropic import Anthropic, NotFoundError

client, asked = Anthropic(base_url=sys.argv[1], api_key="none"), {"temperature": 0}
request = {"model": sys.argv[2], "max_tokens": 20, "extra_body": asked}
request |= {"system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
whole = client.messages.create(**request)
(text,) = whole.content
assert text.type == "text" and 0 < whole.usage.output_tokens <= 20, whole
with client.messages.stream(**request) as stream:
    assert "".join(stream.text_stream) == text.text
    last = stream.get_final_message()
    assert last.content[0].text == text.text and last.stop_reason == whole.stop_reason
words = {name: request[name] for name in ("model", "system", "messages")}
counted = client.messages.count_tokens(**words).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
try:
    client.messages.create(**request | {"model": "none"})
except NotFoundError as error:
    assert "no model 'none'" in error.body["error"]["message"]
else:
    raise AssertionError
"""

AGENTS = """
import asyncio
import sys
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel
from agents import Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

called = []

@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    "Of a city."
    called.append(city)
    return "snow"

class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asked = {"temperature": 2, "max_tokens": 150, "parallel_tool_calls": False}
        settings = ModelSettings(**asked, tool_choice="required", extra_body={"seed": 1})
        model = kind(sys.argv[2], client)
        agent = Agent("a", model=model, tools=[weather], model_settings=settings)
        found = await Runner.run(agent, "weather?")
        assert called and isinstance(found.final_output, str), found
        free = ModelSettings(**asked, extra_body={"seed": 1})
        trip = agent.clone(output_type=Trip, model_settings=free)  # calls, and then a trip
        found = await Runner.run(trip, "where?", max_turns=30)
        assert isinstance(found.final_output, Trip), found
        called.clear()

set_tracing_disabled(True)
asyncio.run(main())
"""

# A proxy in front: OpenAI's protocol by two ways, and Anthropic's.
LITELLM = """
import sys

import httpx
from openai import OpenAI

url, key = sys.argv[1], sys.argv[2]
client = OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
city["additionalProperties"] = False
tools = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
for model in ("vllm", "openai", "anthropic"):
    asked = {"model": model, "temperature": 0, "max_tokens": 60}
    asked["messages"] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content and whole.usage.completion_tokens, whole
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text.strip() == whole.choices[0].message.content.strip(), (text, whole)
    assert [one.usage.completion_tokens for one in chunks if one.usage], chunks
    forced = client.chat.completions.create(**asked, tools=tools, tool_choice="required")
    assert forced.choices[0].message.tool_calls[0].function.name == "weather", forced
    last = client.responses.create(model=model, input="hi", max_output_tokens=8, temperature=0)
    assert last.output_text
    body = {"model": model, "max_tokens": 8, "messages": asked["messages"][1:]}
    answer = httpx.post(url + "/v1/messages", json=body, headers={"x-api-key": key}, timeout=60)
    assert answer.status_code == 200 and answer.json()["type"] == "message", answer.text
assert len(client.embeddings.create(model="openai", input=["a", "b"]).data) == 2
body = {"model": "vllm", "query": "a", "documents": ["b", "c"]}
answer = httpx.post(url + "/v1/rerank", json=body, headers={"Authorization": "Bearer " + key})
assert len(answer.json()["results"]) == 2, answer.text
"""
PROXY = """
model_list:
  - model_name: vllm
    litellm_params: {{model: hosted_vllm/tiny_llama, api_base: {0}/v1, api_key: none}}
  - model_name: openai
    litellm_params: {{model: openai/tiny_llama, api_base: {0}/v1, api_key: none}}
  - model_name: anthropic
    litellm_params: {{model: anthropic/tiny_llama, api_base: {0}, api_key: none}}
"""
# Those of which the answers' form decides; others ask what a random model does not know.
COMPLY = {
    "open-responses": "basic-response,system-prompt,multi-turn,streaming-response,streaming-usage,"
    "assistant-phase,response-output-phase-schema",
    "openai-chat": "chat-basic-response,chat-system-prompt,chat-multi-turn,"
    "chat-streaming-response,chat-streaming-usage",
    "anthropic": "anth-basic-response,anth-system-prompt,anth-multi-turn,anth-streaming-response,"
    "anth-streaming-usage,anth-error-handling",
}
CHATS = (
    "{% if tools %}{# <tool_call> #}{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


@pytest.fixture
def python() -> str:
    """The interpreter that has the clients."""
    if not PYTHON.with_name("litellm").exists():  # the last that was added
        pytest.skip(f"{NO_CLIENTS}: make clients installs them")
    return str(PYTHON)


@pytest.fixture
def served(launch: Launch, tmp_path: Path) -> tuple[str, str]:
    """A server of the tiny GGUF, and the model's name."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    _, url = launch("model=tiny.gguf", "kv_cache=fp32")  # as what its scores are compared with
    return url, httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]


def run(python: str, folder: Path, *arguments: str) -> None:
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "home")}
    command = [python, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def evaluate(python: str, folder: Path, model: str, arguments: str, tasks: str) -> dict[str, Any]:
    """The answers of lm-eval's tasks by their documents, and the scores."""
    for file in DATA.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    options = ["--model", model, "--model_args", arguments, "--tasks", tasks, "--include_path", "."]
    options += ["--output_path", "out", "--log_samples"]
    if "chat" in model:
        options.append("--apply_chat_template")
    run(python, folder, "-m", "lm_eval", "run", *options)
    (results,) = (folder / "out").glob("**/results_*.json")
    found: dict[str, Any] = {"scores": json.loads(results.read_text())["results"]}
    for task in tasks.split(","):
        (samples,) = (folder / "out").glob(f"**/samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda r: r["doc_id"])
        found[task] = [row["resps"] for row in rows]
    return found


def test_lm_evals_scores_are_those_of_its_own_backend(
    python: str, served: tuple[str, str], tmp_path: Path
) -> None:
    """hf.json: `--model hf` of the model as Hugging Face's folder, add_bos_token=False, float32."""
    url, model = served
    words = "run_mode=convert model=tiny.gguf convert_format=huggingface convert_output=hf"
    assert app.main([*words.split(), "verbosity=0"]) == 0
    arguments = f"model={model},base_url={url}/v1/completions,tokenizer=hf,num_concurrent=4"
    arguments += ",tokenizer_backend=huggingface,tokenized_requests=True"
    found = evaluate(python, tmp_path, "local-completions", arguments, "tiny_choice,tiny_words")
    expected = json.loads((DATA / "hf.json").read_text())
    for task, scores in expected["scores"].items():
        assert {name: found["scores"][task][f"{name},none"] for name in scores} == scores
    likelihoods = [[float(one[0][0]) for one in row] for row in found["tiny_choice"]]
    for row, values in zip(likelihoods, expected["tiny_choice"], strict=True):
        assert row == pytest.approx(values, rel=1e-5)
    assert [row[0][0] for row in found["tiny_words"]] == expected["tiny_words"]


def test_lm_evals_chats(python: str, served: tuple[str, str], tmp_path: Path) -> None:
    url, model = served
    arguments = f"model={model},base_url={url}/v1/chat/completions,num_concurrent=4"
    found = evaluate(python, tmp_path, "local-chat-completions", arguments, "tiny_words")
    questions = [json.loads(line) for line in (DATA / "task.jsonl").read_text().splitlines()]
    for place in (0, 7):
        messages = [{"role": "user", "content": questions[place]["question"]}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, "stop": ["\n\n"]}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body).json()
        assert found["tiny_words"][place][0][0] == answer["choices"][0]["message"]["content"]


def test_langchain(python: str, served: tuple[str, str], tmp_path: Path) -> None:
    url, model = served
    run(python, tmp_path, "-c", LANGCHAIN, f"{url}/v1", model)


def test_openais_responses(python: str, served: tuple[str, str], tmp_path: Path) -> None:
    url, model = served
    run(python, tmp_path, "-c", RESPONSES, f"{url}/v1", model)


def test_anthropics_package(python: str, served: tuple[str, str], tmp_path: Path) -> None:
    url, model = served
    run(python, tmp_path, "-c", ANTHROPIC, url, model)


def test_openais_embeddings(python: str, served: tuple[str, str], tmp_path: Path) -> None:
    url, model = served
    run(python, tmp_path, "-c", EMBEDDINGS, f"{url}/v1", model)


@pytest.fixture
def chats(launch: Launch, tmp_path: Path) -> str:
    """The address of a server of a model with a chat template that has tools."""
    (tmp_path / "chats.jinja").write_text(CHATS)
    _, url = launch(
        "processor.tokenizer.chat_template=chats.jinja", "model.model_config.seq_length=2048"
    )
    return url


def test_openais_agents(python: str, chats: str, tmp_path: Path) -> None:
    run(python, tmp_path, "-c", AGENTS, f"{chats}/v1", "tiny_llama")


@pytest.mark.parametrize("protocol", COMPLY)
def test_published_schemas_hold(python: str, chats: str, tmp_path: Path, protocol: str) -> None:
    words = ["-u", f"{chats}/v1", "-m", "tiny_llama", "-k", "none", "--format", protocol]
    # How a random model's answer ends is not what is asked here.
    words += ["-f", COMPLY[protocol], "-i", "expected status=,finish_reason,stop_reason"]
    run(python, tmp_path, str(Path(python).with_name("llm-comply")), *words)


def test_litellm_in_front(python: str, chats: str, tmp_path: Path) -> None:
    (tmp_path / "proxy.yaml").write_text(PROXY.format(chats))
    key, port = "sk-of-a-test-0123456789abcdef", free_port()
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    words = ["--config", "proxy.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(
        [python, Path(python).with_name("litellm"), *words],
        cwd=tmp_path,
        env={**os.environ, **own},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    ) as proxy:
        try:
            url = f"http://127.0.0.1:{port}"
            while not _answers(f"{url}/health/liveliness"):
                assert proxy.poll() is None
                time.sleep(0.2)
            run(python, tmp_path, "-c", LITELLM, url, key)
        finally:
            proxy.kill()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.HTTPError:
        return False
