from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.formats.mindformers import to_mindformers
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.write import convert
from tests.paths import REFERENCE

# Of the checkpoint that MindFormers 1.0.2 saved: names, shapes and values, sorted by name.
GLM_DIGEST = "ac40076b0369f4c4937c8c63d04945162db9c4e167b4a5c73b1083edf0a6147c"
CHATGLM = REFERENCE / "chatglm_6b"


@pytest.fixture
def model() -> Decoder:
    found = model_config_of(CHATGLM)
    assert found is not None
    return found


def digest(tensors: Mapping[str, LazyTensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode() + str(tensors[name].shape).encode())
        sha.update(tensors[name].read().tobytes())
    return sha.hexdigest()


def same(found: Mapping[str, LazyTensor], wanted: Mapping[str, LazyTensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name].read(), wanted[name].read()) for name in wanted
    )


def test_mindformers_own_checkpoint_and_back(model: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "glm.ckpt"
    convert(CHATGLM, model, file, "ckpt")
    assert digest(open_ckpt(file)) == GLM_DIGEST
    tensors = open_checkpoint(CHATGLM, model)
    assert same(open_checkpoint(file, model), tensors)
    convert(file, model, tmp_path / "back", "huggingface")
    theirs = (tmp_path / "back/model.safetensors").read_bytes()
    assert theirs == (CHATGLM / "model.safetensors").read_bytes()


def test_a_cache_that_was_saved_is_left_out(model: Decoder, tmp_path: Path) -> None:
    tensors = to_mindformers(open_checkpoint(CHATGLM, model), model)
    past = LazyTensor((1, 4, 12, 48), "F32", lambda: np.zeros((1, 4, 12, 48), np.float32))
    layers = [
        f"transformer.layers.{layer}.{kind}_past" for layer in (0, 1) for kind in ("key", "value")
    ]
    write_ckpt(tmp_path / "past.ckpt", tensors | dict.fromkeys(layers, past))
    found = open_checkpoint(tmp_path / "past.ckpt", model)
    assert same(found, open_checkpoint(CHATGLM, model))


def test_unfused_tensors_are_read_too(model: Decoder, tmp_path: Path) -> None:
    """As in a file that was merged from shards."""
    tensors = open_checkpoint(CHATGLM, model)
    write_safetensors(tmp_path / "own.safetensors", tensors, {})
    assert same(open_checkpoint(tmp_path / "own.safetensors", model), tensors)


def test_a_missing_tensor_has_its_stored_name_in_the_error(model: Decoder, tmp_path: Path) -> None:
    tensors = to_mindformers(open_checkpoint(CHATGLM, model), model)
    del tensors["transformer.layers.1.attention.query_key_value.bias"]
    write_ckpt(tmp_path / "less.ckpt", tensors)
    with pytest.raises(ArtifactError, match=r"layers\.1\.attention\.query_key_value\.bias \[144\]"):
        open_checkpoint(tmp_path / "less.ckpt", model)


def test_types_that_differ_in_one_tensor_become_float32(model: Decoder, tmp_path: Path) -> None:
    tensors = open_checkpoint(CHATGLM, model)
    name = "layers.0.attention.key.weight"
    half = LazyTensor(tensors[name].shape, "F16", lambda: tensors[name].read().astype(np.float16))
    mixed = tensors | {name: half}
    write_ckpt(tmp_path / "x.ckpt", to_mindformers(mixed, model))
    assert same(
        open_checkpoint(tmp_path / "x.ckpt", model),
        mixed | {name: LazyTensor(half.shape, "F32", half.float32)},
    )
