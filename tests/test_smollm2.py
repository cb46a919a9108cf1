"""The real model against transformers on the same GGUF (tests/fixtures/reference)."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Request
from lite_runner.native.packed_model import pack
from lite_runner.output.scoring import BackendScorer, evaluate
from lite_runner.text import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.each import each
from tests.paths import ROOT

REFERENCE = json.loads(
    (ROOT / "tests/fixtures/reference/smollm2_135m.json").read_text(encoding="utf-8")
)
CASES = REFERENCE["completions"] + REFERENCE["chats"]
# One worker loads the model for all of these.
pytestmark = pytest.mark.xdist_group("smollm2")


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf, model_vocab=None)


@pytest.fixture(scope="module")
def backend(smollm2_gguf: Path) -> NativeBackend:
    """With the floats that the file's integers stand for, as transformers has them."""
    config = model_config_of(smollm2_gguf)
    assert config is not None
    weights = QuantizedWeights(open_checkpoint(smollm2_gguf, config), config)
    layers = pack(config, weights, dequantize=True)
    return NativeBackend(config, layers, NativeOptions(slots=4, length=512))


@pytest.fixture(scope="module")
def completions(backend: NativeBackend) -> list[list[int]]:
    """Of every case, all in one call over four slots: batch, refill and lengths at once."""
    options = GenerationConfig(max_new_tokens=REFERENCE["max_new_tokens"], eos_token_id=(2,))
    requests = [Request(np.array(case["prompt_ids"], np.int32), options) for case in CASES]
    return [each.token_ids for each in Engine(backend).generate(requests).completions]


@each("index", range(len(CASES)))
def test_greedy_tokens_equal_transformers(completions: list[list[int]], index: int) -> None:
    case = CASES[index]
    expected = case["token_ids"]
    if case["finish_reason"] == "stop":  # transformers keeps the eos token
        expected = [token for token in expected if token != 2]
    assert completions[index] == expected


@pytest.mark.parametrize("case", REFERENCE["completions"], ids=lambda case: case["prompt"][:12])
def test_prompt_ids_equal_transformers(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


@pytest.mark.parametrize("case", REFERENCE["chats"], ids=lambda case: case["question"][:12])
def test_chat_prompt_equals_transformers(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": case["question"]}]
    assert tokenizer.render_chat(messages) == case["prompt"]
    assert tokenizer.encode_chat(messages) == case["prompt_ids"]


def test_first_logits_equal_transformers(backend: NativeBackend) -> None:
    for case in REFERENCE["completions"]:
        logits = backend.forward([Row(0, np.array(case["prompt_ids"], np.int32), 0)])[0]
        expected = np.array(case["first_top5_logits"])
        got = logits[case["first_top5_ids"]]
        assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_perplexity_equals_transformers(backend: NativeBackend, scores: Callable) -> None:
    """The second half token by token through the cache; each slot takes a part of that, behind all
    that is before it."""
    ids = np.array(REFERENCE["perplexity"]["token_ids"], np.int32)
    half = len(ids) // 2
    parts = [list(part) for part in np.array_split(range(half, len(ids) - 1), backend.info.slots)]
    losses: dict[int, float] = dict(enumerate(-scores(backend, ids[: half + 1])))
    for slot, part in enumerate(parts):
        backend.forward([Row(slot, ids[: part[0]], 0)])
    for positions in itertools.zip_longest(*parts):
        rows = [
            Row(slot, ids[position : position + 1], position)
            for slot, position in enumerate(positions)
            if position is not None
        ]
        for row, logits in zip(rows, backend.forward(rows).astype(np.float64), strict=True):
            total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
            losses[row.position] = total - logits[ids[row.position + 1]]
    assert len(losses) == len(ids) - 1
    perplexity = float(np.exp(np.mean(list(losses.values()))))
    assert perplexity == pytest.approx(REFERENCE["perplexity"]["value"], rel=1e-4)


def test_sliding_windows_equal_transformers(backend: NativeBackend, tokenizer: Tokenizer) -> None:
    """The bounds and counts of windows, of any size and stride, are in test_scoring.py."""
    case = min(REFERENCE["windows"]["perplexities"], key=lambda case: case["window"])
    text = (ROOT / "tests/fixtures/text" / REFERENCE["windows"]["file"]).read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text), np.int32)
    assert len(ids) == REFERENCE["windows"]["tokens"]
    found = evaluate(BackendScorer(backend), ids, case["window"], case["stride"])
    assert found.scored_tokens == case["scored_tokens"]
    assert found.perplexity == pytest.approx(case["value"], rel=1e-5)


def test_scores_equal_transformers(backend: NativeBackend, scores: Callable) -> None:
    """A graph of the model is made, and asked, by docs/export.md."""
    ids = np.array(REFERENCE["perplexity"]["token_ids"], np.int32)
    assert -scores(backend, ids).mean() == pytest.approx(REFERENCE["perplexity"]["mean_nll"], 1e-5)


@pytest.mark.usefixtures("light_msrun")
def test_three_ranks_say_the_same(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Nine heads over three key/value heads: three ranks, each with a third of every layer."""
    cases = REFERENCE["completions"]
    command = [
        *(sys.executable, str(ROOT / "run_lite.py"), "model=smollm2_135m"),
        *(f"load_checkpoint={smollm2_gguf}", "quant=a16"),
        f"max_new_tokens={REFERENCE['max_new_tokens']}",
        *("use_parallel=true", "parallel_config.model_parallel=3", "context.device_target=CPU"),
        *("--predict_data", *(case["prompt"] for case in cases)),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "outputs/latest/result.json").read_text(encoding="utf-8"))
    assert result["world_size"] == 3
    for case, row in zip(cases, result["results"], strict=True):
        expected = [token for token in case["token_ids"] if token != 2]
        assert row["token_ids"] == expected, case["prompt"]
