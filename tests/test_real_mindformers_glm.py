"""What the real MindFormers 1.0.2 saved of a ChatGLM2, loaded here: tests/fixtures/README.md says
how it was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner import AutoModel
from lite_runner.architectures import chatglm
from lite_runner.backends.base import Backend, Row
from lite_runner.backends.mindspore import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native import NativeBackend, NativeOptions
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from lite_runner.weights.write import convert
from tests.paths import FIXTURES

GLM2 = FIXTURES / "mindformers" / "glm2"
CONFIG = chatglm.decoder(
    vocab_size=130,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    n_kv_heads=2,
    head_dim=12,
    intermediate_size=80,
    seq_length=48,
    norm_eps=1e-5,
    rope_ratio=1.0,
    qkv_bias=True,
    tie_word_embeddings=False,
    eos_token_id=(2,),
    pad_token_id=0,
)
TABLE = "transformer.embedding.embedding_table"  # as 1.0.2 calls it; 1.3.2 has embedding_weight
Error = Callable[[NDArray, NDArray], float]


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.load(GLM2 / "expected.npz")


def backend(kind: str, *, kernels: bool) -> Backend:
    tensors = open_checkpoint(GLM2 / kind / "glm2.ckpt", CONFIG)
    if kernels:
        weights = QuantizedWeights(tensors, CONFIG)
        return NativeBackend(CONFIG, weights, NativeOptions(slots=1, length=48))
    return MindSporeBackend(CONFIG, ReadAhead(tensors), MindSporeOptions(slots=1, length=48))


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [("plain", True), ("past", True), ("plain", False)],
    ids=["own operators", "with its cache", "MindSpore's"],
)
def test_logits_at_each_position(
    kind: str, kernels: bool, expected: Any, relative_error: Error
) -> None:
    model = backend(kind, kernels=kernels)
    for prompt, length, logits in zip(
        expected["prompts"], expected["lengths"], expected["logits"], strict=True
    ):
        half = length // 2 + 1
        found = [model.forward([Row(0, prompt[:half], 0)])[0]]
        for place in range(half, length):
            found.append(model.forward([Row(0, prompt[place : place + 1], place)])[0])
        assert relative_error(np.stack(found), logits[half - 1 : length]) <= 1e-5


def prompts_of(expected: Any) -> list[list[int]]:
    pairs = zip(expected["prompts"], expected["lengths"], strict=True)
    return [row[:length].tolist() for row, length in pairs]


@pytest.mark.parametrize("kind", ["plain", "past"])
def test_a_folder_of_save_pretrained_gives_its_tokens(kind: str, expected: Any) -> None:
    prompts = prompts_of(expected)
    found = AutoModel.from_pretrained(GLM2 / kind).generate(prompts, max_new_tokens=14)
    for prompt, ids, tokens in zip(prompts, found, expected["tokens"].tolist(), strict=True):
        assert ids == prompt + tokens


def same_bits(found: Path, wanted: Path) -> None:
    ours, theirs = open_ckpt(found), open_ckpt(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name].read(), tensor.read())


def test_both_names_of_the_embedding(tmp_path: Path) -> None:
    saved = open_ckpt(GLM2 / "plain" / "glm2.ckpt")
    newer = {name.replace(TABLE, TABLE.replace("table", "weight")): saved[name] for name in saved}
    write_ckpt(tmp_path / "newer.ckpt", newer)
    ours = open_checkpoint(GLM2 / "plain" / "glm2.ckpt", CONFIG)
    for name, tensor in open_checkpoint(tmp_path / "newer.ckpt", CONFIG).items():
        np.testing.assert_array_equal(tensor.read(), ours[name].read())
    convert(GLM2 / "plain" / "glm2.ckpt", CONFIG, tmp_path / "back.ckpt", "ckpt")
    same_bits(tmp_path / "back.ckpt", tmp_path / "newer.ckpt")


def test_to_hugging_face_and_back(tmp_path: Path) -> None:
    """Fused as both have it, whatever is done between."""
    convert(GLM2 / "plain" / "glm2.ckpt", CONFIG, tmp_path / "theirs", "huggingface")
    convert(tmp_path / "theirs", CONFIG, tmp_path / "back.ckpt", "ckpt")
    convert(GLM2 / "plain" / "glm2.ckpt", CONFIG, tmp_path / "once.ckpt", "ckpt")
    same_bits(tmp_path / "back.ckpt", tmp_path / "once.ckpt")
