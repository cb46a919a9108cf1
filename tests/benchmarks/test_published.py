"""The files of make bench-gguf: known here, of the sizes and types that their names promise."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from lite_runner.text import load_tokenizer
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("size", "layers", "types"),
    [
        ("qwen2.5_0.5b", 8, {"Q5_0", "Q8_0", "Q4_K", "Q6_K", "F32"}),  # 896 inputs: no whole blocks
        ("llama_7b", 4, {"Q4_K", "Q6_K", "F32"}),
    ],
)
def test_a_file_as_published(
    tmp_path: Path, size: str, layers: int, types: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import published

    sizes = replace(published.PUBLISHED[size], layers=layers, vocabulary=1000, intermediate=512)
    path = tmp_path / "model.gguf"
    published.write(path, sizes)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} == types
    model = model_config_of(path)
    assert model is not None and model.hidden_size == sizes.hidden
    for tensor in open_checkpoint(path, model).values():
        values = tensor.float32()
        if values.ndim == 2:
            assert 0.7 < values.std() * values.shape[1] ** 0.5 < 1.4
    tokenizer = load_tokenizer(path, model_vocab=model.vocab_size)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    del sys.modules["published"], sys.modules["random_gguf"]
