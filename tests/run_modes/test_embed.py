"""run_mode=embed: files in, vectors out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lite_runner import app
from lite_runner.backends import Row
from lite_runner.plan.resources import open_planned
from lite_runner.run_modes import embed
from lite_runner.text.tokenizer import byte_tokenizer

TEXTS = ["a red apple", "pears", "it is cold in Oslo today, and it snows " * 3, "b"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    lines = [json.dumps({"prompt": text, "id": place}) for place, text in enumerate(TEXTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))


def run(*arguments: str, data: str = "texts.txt") -> int:
    words = "run_mode=embed model=tiny_llama seed=1 verbosity=0 overwrite=true"
    return app.main([*words.split(), f"predict_data={data}", *arguments])


@pytest.mark.usefixtures("texts")
def test_files_of_vectors(resolve: Callable[..., embed.Config]) -> None:
    """Both kinds, in any batch, are the pooled hidden states of the backend."""
    assert run("embed_output=last.npy") == 0
    assert run("embed_output=last.jsonl", "embed.batch=1", data="texts.jsonl") == 0
    plain = ("embed.pooling=mean", "embed.normalize=false", "embed.dimensions=10")
    assert run("embed_output=mean.npy", *plain) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text())
    assert (result["run_mode"], result["backend"], result["results"]) == ("embed", "native", [])
    last, mean = np.load("last.npy"), np.load("mean.npy")
    assert last.dtype == mean.dtype == np.float32 and mean.shape == (4, 10)
    written = [json.loads(line) for line in Path("last.jsonl").read_text().splitlines()]
    assert [one["index"] for one in written] == [0, 1, 2, 3]
    assert (np.array([one["embedding"] for one in written], np.float32) == last).all()
    words = "run_mode=embed model=tiny_llama seed=1 predict_data=texts.txt embed_output=new.npy"
    backend = open_planned(embed.plan(resolve(*words.split(), "verbosity=0")))
    for place, text in enumerate(TEXTS):
        ids = np.array(byte_tokenizer().encode(text), np.int32)
        states = backend.hidden([Row(0, ids, 0, logits=len(ids), hidden=True)])
        unit = states[-1] / np.linalg.norm(states[-1])
        assert np.abs(last[place] - unit).max() < 1e-6
        assert np.abs(mean[place] - states.mean(axis=0)[:10]).max() < 1e-6
    backend.close()


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed_output=out.bin"], "a file with the suffix .npy or .jsonl"),
        (["embed_output=out.npy", "temperature=1"], "temperature=1"),
        (["embed_output=out.npy", "embed.dimensions=65"], "expected at most 64"),
        (["embed_output=out.npy", "max_length=8"], "text 2: 117 tokens, expected 1 to 8"),
        (["embed_output=out.npy", "backend=ms"], "gives no hidden states"),
        (["embed_output=texts.npy", "overwrite=false"], "texts.npy: exists already"),
        (["embed_output=out.npy", "predict_data=none.txt"], "none.txt"),
        (["embed_output=out.npy", "predict_data=notes.md"], "notes.md is a file, expected one of"),
        (["embed_output=out.npy", "predict_data=chat.jsonl"], "chat.jsonl:2: got messages"),
    ],
    ids=str,
)
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts.npy").touch()
    Path("notes.md").touch()
    chat = {"messages": [{"role": "user", "content": "a"}]}
    Path("chat.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(chat))
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
