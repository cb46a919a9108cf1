"""Draft models: whose tokens are the model's, and with it in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.errors import ConfigError
from lite_runner.generation.draft_model import DraftModel
from lite_runner.generation.speculation import PromptLookups
from lite_runner.model import ModelFiles
from lite_runner.model.draft import check_vocabulary
from lite_runner.text import load_tokenizer
from tests.backends.shared import need_of
from tests.models import model_named
from tests.refusals import refused
from tests.tokenizer_files import write_ascii_tokenizer

TINY = ("model=tiny_llama", "predict_data=[hello,hello there]", "max_new_tokens=24")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, whatever they cost."""
    for drafts in (DraftModel, PromptLookups):
        monkeypatch.setattr(drafts, "most", lambda *_: 3)
        monkeypatch.setattr(drafts, "took", lambda *_: None)


def generated(*settings: str) -> tuple[list[list[int]], dict[str, Any]]:
    """The token ids of each prompt, and the timing."""
    assert main([*TINY, *settings]) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text())
    return [row["token_ids"] for row in result["results"]], result["timing"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("settings", [(), ("do_sample=true", "seed=3", "temperature=2.0")])
def test_tokens_are_the_same_with_a_draft_model(settings: tuple[str, ...]) -> None:
    expected, plain = generated(*settings, "speculate=none")
    same, own = generated(*settings, "draft_model=tiny_llama")
    other, few = generated(*settings, "draft_model=tiny_qwen2")
    assert expected == same == other
    assert plain["drafted_tokens"] == 0 < own["drafted_tokens"]
    if not settings:
        assert own["accepted_tokens"] == own["drafted_tokens"]
    assert few["accepted_tokens"] < few["drafted_tokens"] / 2


@pytest.mark.usefixtures("eager")
def test_the_native_backend_looks_up_by_default() -> None:
    repeated = ("predict_data=a b c a b c a b c", "max_new_tokens=12")
    expected, plain = generated(*repeated, "speculate=none")
    same, looked_up = generated(*repeated)
    assert expected == same
    assert plain["drafted_tokens"] == 0 < looked_up["drafted_tokens"]
    stock = ("backend=ms", "model.model_config.num_layers=1")  # to compile
    assert generated(*repeated, *stock)[1]["drafted_tokens"] == 0


def test_memory_of_both_is_planned() -> None:
    alone, both = (need_of("model=tiny_llama", *more) for more in ([], ["draft_model=tiny_llama"]))
    assert both.weights == 2 * alone.weights and both.process == alone.process
    assert both.cache == 2 * alone.cache and both.work == 2 * alone.work


def test_another_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused([*TINY, "draft_model=smollm2_135m", "dry_run=true"], 2)
    assert "draft_model: " in (stderr := capsys.readouterr().err)
    assert "has another vocabulary: " in stderr  # a token, where its files are in the cache
    named = "token 0 is '<|endoftext|>', expected 'Ā' as in the built-in byte tokenizer"
    assert "49152 tokens, expected 320" in stderr or named in stderr
    refused([*TINY, "draft_model=nowhere"], 4)
    assert "draft_model=nowhere: " in capsys.readouterr().err


def test_tokens_are_compared_one_by_one(tmp_path: Path) -> None:
    model = model_named("tiny_llama")
    files = []
    for name, ids in {"big": 96, "small": 90, "other": 96}.items():
        (tmp_path / name).mkdir()
        write_ascii_tokenizer(tmp_path / name, ids)
        files.append(ModelFiles(name, tmp_path / name, model, 0))
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace('"A"', '"\\u00c4"'))
    tokenizer = load_tokenizer(tmp_path / "big", model_vocab=None)
    check_vocabulary(files[1], files[0], tokenizer)  # fewer tokens, but no others
    with pytest.raises(ConfigError, match=r"other has another vocabulary: token .* expected 'A'"):
        check_vocabulary(files[2], files[0], tokenizer)


def test_ranks_that_share_a_model_have_no_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    refused([*TINY, "draft_model=tiny_llama", "parallel=tp2"], 2)
    assert "draft_model: not supported with tensor parallelism" in capsys.readouterr().err
