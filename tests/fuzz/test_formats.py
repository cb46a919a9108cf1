"""Mutations reach what a format holds, and a seed repeats them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from fuzz import formats, values
from fuzz.values import Mutation
from tests.paths import FIXTURES, REFERENCE
from tests.tiny_gguf import write_tiny_gguf

CKPT = FIXTURES / "mindformers/llama/plain/llama.ckpt"
YAML = CKPT.with_suffix(".yaml")
MODEL = REFERENCE / "llama"
TORCH = FIXTURES / "torch/bloom/pytorch_model.bin"


@pytest.mark.parametrize(
    ("mutation", "path"),
    [
        (values.flip_bytes, CKPT),
        (formats.json_text, MODEL / "config.json"),
        (formats.json_lines, MODEL / "config.json"),
        (formats.yaml_text, YAML),
        (formats.plain_text, YAML),
        (formats.safetensors, MODEL / "model.safetensors"),
        (formats.protobuf, CKPT),
        (formats.torch_zip, TORCH),
    ],
)
def test_a_seed_repeats_a_mutation(
    mutation: Mutation, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = path.read_bytes()
    if mutation is formats.json_lines:
        data = json.dumps(json.loads(data)).encode()
    mutations = [mutation(data, Random(seed)) for seed in range(30)]
    monkeypatch.setattr("time.time", lambda: 1e9)  # on another day
    assert mutations == [mutation(data, Random(seed)) for seed in range(30)]
    assert len(set(mutations) - {data}) > 15


def test_headers_of_safetensors_are_mostly_read() -> None:
    data = (MODEL / "model.safetensors").read_bytes()
    fits = 0
    for seed in range(50):
        file = formats.safetensors(data, Random(seed))
        length = int.from_bytes(file[:8], "little")
        fits += file[8 + length - 1 : 8 + length] in (b"}", b"]")
    assert fits > 30


def test_messages_are_taken_apart_and_put_together_again() -> None:
    data = CKPT.read_bytes()
    assert formats._encoded(formats._fields(data)) == data


def test_all_numbers_of_a_gguf_header_are_found(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "x.gguf")
    data = (tmp_path / "x.gguf").read_bytes()
    layouts = [layout for _, layout in formats._gguf_places(data)]
    assert {"B", "I", "Q", "f", "?"} <= set(layouts)
    starts = {start for start, _ in formats._gguf_places(data)}
    assert {4, 8, 16} <= starts and max(starts) < len(data)
