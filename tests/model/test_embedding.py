"""Settings of embeddings in checkpoints: folders of sentence-transformers, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lite_runner import app
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.embedding import embedding_of
from lite_runner.text.tokenizer import byte_tokenizer
from tests.tokenizer_files import write_tokenizer

LAST = "pooling_mode_lasttoken"
MEAN = "pooling_mode_mean_tokens"
QUERY = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"


def write_form(
    folder: Path, pooling: dict[str, Any], *modules: str, prompts: Any = None, usual: Any = None
) -> None:
    """The files that sentence-transformers writes beside a model."""
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{m}", m) for m in modules)]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(listed)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    sizes = {"word_embedding_dimension": 64, "include_prompt": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(sizes | pooling))
    settings = {"prompts": prompts or {}, "default_prompt_name": usual}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def files_of(folder: Path | None, **metadata: Any) -> ModelFiles:
    gguf = SimpleNamespace(metadata=metadata, path=Path("x.gguf")) if metadata else None
    return cast(ModelFiles, SimpleNamespace(path=folder, gguf=gguf))


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    assert embedding_of(files).pooling is None and embedding_of(files).normalize
    prompts = {"query": QUERY, "document": ""}
    write_form(tmp_path, {MEAN: False, LAST: True}, "Normalize", prompts=prompts)
    found = embedding_of(files)
    assert (found.pooling, found.normalize) == ("last", True)
    assert found.prompt("query") == QUERY and found.prompt(None) == found.prompt("document") == ""
    assert embedding_of(files, "mean").pooling == "mean"
    write_form(tmp_path, {"pooling_mode": "mean"}, prompts=prompts, usual="query")
    found = embedding_of(files)
    assert (found.pooling, found.normalize, found.prompt(None)) == ("mean", False, QUERY)
    with pytest.raises(ConfigError, match="no prompt 'passage'; the checkpoint has: query, docu"):
        found.prompt("passage")


@pytest.mark.parametrize(
    ("pooling", "modules", "says"),
    [
        ({"pooling_mode_cls_token": True}, (), "pooling by cls is not computed"),
        ({MEAN: True, LAST: True}, (), "mean and lasttoken together"),
        ({LAST: True}, ("Dense",), "the module Dense"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], says: str
) -> None:
    write_form(tmp_path, pooling, *modules)
    with pytest.raises(ArtifactError, match=says):
        embedding_of(files_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modules.json", '[{"type": "x.Pooling", "path": "../.."}]'),
        ("modules.json", '[{"type": "x.Pooling", "path": "/etc"}]'),
        ("modules.json", '{"a": 1}'),
        ("1_Pooling/config.json", "[]"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}'),
        ("config_sentence_transformers.json", '{"default_prompt_name": "a"}'),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    write_form(tmp_path, {LAST: True})
    (tmp_path / name).write_text(text)
    with pytest.raises(ArtifactError):
        embedding_of(files_of(tmp_path))


@pytest.mark.parametrize(("kind", "expected"), [(None, None), (0, None), (1, "mean"), (3, "last")])
def test_the_pooling_type_of_a_gguf(kind: int | None, expected: str | None) -> None:
    metadata = {"general.architecture": "qwen3"}
    metadata |= {} if kind is None else cast(Any, {"qwen3.pooling_type": kind})
    found = embedding_of(files_of(Path("x.gguf"), **metadata))
    assert found.pooling == expected and found.normalize
    with pytest.raises(ArtifactError, match="by cls"):
        embedding_of(files_of(None, **metadata | {"qwen3.pooling_type": 2}))


def test_it_works_as_published(
    write_tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bare model's tensors, as sentence-transformers writes them, and what its files say."""
    monkeypatch.chdir(tmp_path)
    folder = write_tiny_llama("model")
    write_tokenizer(byte_tokenizer(), folder)
    Path("texts.txt").write_text("red apples\npears")
    Path("asked.txt").write_text("Find:red apples\nFind:pears")

    def vectors(data: str, *words: str) -> Any:
        words = (f"predict_data={data}", "embed_output=out.npy", "overwrite=true", *words)
        assert app.main(["run_mode=embed", f"model={folder}", "verbosity=0", *words]) == 0
        return np.load("out.npy")

    typed = ("embed.pooling=mean", "embed.normalize=false")
    plain, asked = vectors("texts.txt", *typed), vectors("asked.txt", *typed)
    write_form(folder, {MEAN: True}, prompts={"query": "Find:", "document": ""})
    assert (vectors("texts.txt") == plain).all()
    assert (vectors("texts.txt", "embed.prompt=query") == asked).all()
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.abs(vectors("texts.txt", "embed.normalize=true") - unit).max() < 1e-6
    write_form(folder, {MEAN: True}, prompts={"query": "Find:"}, usual="query")
    assert (vectors("texts.txt") == asked).all()
    words = f"run_mode=embed model={folder} predict_data=a embed_output=x.npy verbosity=0"
    assert app.main([*words.split(), "embed.prompt=passage"]) == 2
