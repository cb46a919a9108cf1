"""/v1/embeddings and /v1/rerank, over a tiny model and a mock."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from lite_runner.backends.native.backend import NativeBackend
from lite_runner.config.generation import Pooling
from lite_runner.model.embedding import EmbeddingConfig
from tests.conftest import Reference
from tests.generation.mock import MockBackend
from tests.paths import FIXTURES
from tests.serving.conftest import VOCAB, Served, Start, tokenizer_with_chat

KNOWN = np.load(FIXTURES / "embeddings.npz")
RERANK = {"query": "a", "documents": ["one", "two", "three"]}


@pytest.fixture(scope="module")
def qwen3() -> Reference:
    return Reference("qwen3")


def started(start: Start, known: Reference, pooling: Pooling = "last", **settings: Any) -> Served:
    backend: NativeBackend = known.native(2, known.length, cache="fp32", threads=1)
    return start(backend, embedding=EmbeddingConfig(pooling), **settings)


def post(served: Served, path: str = "embeddings", **body: Any) -> httpx2.Response:
    return httpx2.post(f"{served.url}/v1/{path}", json=body, timeout=60)


def unit(rows: NDArray[Any]) -> NDArray[Any]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_transformers(
    start: Start, qwen3: Reference, pooling: Pooling
) -> None:
    """More texts than slots, by the official package, which asks for base64."""
    served = started(start, qwen3, pooling)
    prompts = [one.tolist() for one in qwen3.prompts]
    answer = served.client.embeddings.create(model="base", input=prompts)
    expected = unit(KNOWN[f"qwen3-{pooling}"])
    assert [one.index for one in answer.data] == [0, 1, 2, 3] and answer.model == "base"
    found = np.array([one.embedding for one in answer.data])
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    floats = served.client.embeddings.create(
        model="base", input=prompts[1], encoding_format="float", dimensions=5
    )
    short = unit(KNOWN[f"qwen3-{pooling}"][1:2, :5])
    assert np.abs(np.array(floats.data[0].embedding) - short).max() <= 1e-5
    plain = post(served, input=prompts, normalize=False).json()["data"]
    found, expected = np.array([one["embedding"] for one in plain]), KNOWN[f"qwen3-{pooling}"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_chunks_cached_prefixes_and_generation_beside_change_nothing(
    start: Start, qwen3: Reference
) -> None:
    longest = max((one.tolist() for one in qwen3.prompts), key=len)
    asked = {"input": [longest, longest[:-1]], "normalize": False}
    for pooling in ("mean", "last"):
        served = started(start, qwen3, pooling, token_budget=8)
        first = post(served, **asked).json()
        completion = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{served.url}/v1/completions", json=completion) as stream:
            next(stream.iter_lines())
            assert post(served, **asked).json() == first
        served.until_idle()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[96]]}, "input"),
        ({"input": [1] * 2000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1], "dimensions": 0}, "dimensions"),
        ({"input": [1], "dimensions": 1 << 20}, "dimensions"),
        ({"input": [1], "encoding_format": "int8"}, "encoding_format"),
        ({"input": [1], "model": "none"}, "model"),
        ({"input": [1], "temperature": 1}, "temperature"),
    ],
)
def test_refused(start: Start, qwen3: Reference, body: dict[str, Any], field: str) -> None:
    answer = post(started(start, qwen3), **body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == field


def test_a_backend_without_hidden_states(start: Start) -> None:
    client = start().client
    with pytest.raises(openai.BadRequestError, match="mock gives no embeddings"):
        client.embeddings.create(model="base", input="a")
    assert client.completions.create(model="base", prompt="a", max_tokens=1).choices


def by_length(history: list[int], adapter: int) -> NDArray[np.float32]:
    """The shorter the prompt, the more it is yes."""
    scores = np.zeros(VOCAB, np.float32)
    scores[ord("y")], scores[ord("n")] = 300 / len(history), 1
    return scores


def test_documents_are_ranked_by_yes_and_no(start: Start) -> None:
    served = start(MockBackend(by_length, 2, 512, 4), tokenizer=tokenizer_with_chat())
    documents = ["three", {"text": "one"}, "fourth", "eleventh"]
    answer = post(served, "rerank", query="a", documents=documents).json()
    assert [one["index"] for one in answer["results"]] == [1, 0, 2, 3]
    assert answer["results"][0]["document"] == {"text": "one"}
    forward = served.backend.steps
    tokens = sorted({len(row.tokens) for step in forward for row in step if row.position == 0})
    margin = 300 / tokens[0] - 1
    assert answer["results"][0]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-margin)))
    few = post(served, "rerank", **RERANK, top_n=1, return_documents=False).json()
    assert list(few["results"][0]) == ["index", "relevance_score"] and len(few["results"]) == 1
    assert few["results"][0]["index"] == 0 and few["usage"]["total_tokens"] > 3 * len("one")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"documents": []}, "documents"), ({"top_n": 0}, "top_n"), ({"model": "none"}, "model")),
        ({"documents": [{"text": 1}]}, "documents.0.text"),
    ],
    ids=str,
)
def test_rerank_refused(start: Start, changes: dict[str, Any], field: str) -> None:
    answer = post(start(), "rerank", **RERANK | changes)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == field


def test_rerank_needs_a_switch_for_thinking(start: Start) -> None:
    thinks = tokenizer_with_chat("{{ messages[0].content }}<think></think>")
    error = post(start(tokenizer=thinks), "rerank", **RERANK).json()["error"]
    assert error["message"].startswith("model: the model thinks") and error["param"] == "model"


def test_prompts_of_the_checkpoint(start: Start, qwen3: Reference) -> None:
    """Before each text, by name; the usual one where none is asked for."""
    prompts = {"query": "Q: ", "document": ""}
    backend: NativeBackend = qwen3.native(2, 40, cache="fp32", threads=1)
    config = EmbeddingConfig("last", normalize=False, prompts=prompts, usual="query")
    served = start(backend, embedding=config)

    def vector(**body: Any) -> list[float]:
        found: list[float] = post(served, **body).json()["data"][0]["embedding"]
        return found

    asked = vector(input="AB")
    assert asked == vector(input="Q: AB", prompt_name="document")
    assert asked != vector(input="AB", prompt_name="document")
    assert abs(np.linalg.norm(asked) - 1) > 1e-3
    assert abs(np.linalg.norm(vector(input="AB", normalize=True)) - 1) < 1e-6
    for body in ({"input": "A", "prompt_name": "no"}, {"input": [1], "prompt_name": "query"}):
        answer = post(served, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_name"
