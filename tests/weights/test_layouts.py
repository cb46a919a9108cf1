from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.layouts import check_tensors, expected_tensors, random_checkpoint
from tests.sizes import resized


def test_bloom_names_and_shapes(configs: Mapping[str, Decoder]) -> None:
    shapes = expected_tensors(configs["bloom"])
    assert len(shapes) == 3 + 16 * 2 + 2
    assert shapes["embedding.word_embedding.embedding_table"] == (40, 32)
    assert shapes["embedding.norm.gamma"] == (32,)
    assert shapes["blocks.1.layernorm2.beta"] == (32,)
    assert shapes["blocks.0.attention.dense3.weight"] == (32, 32)
    assert shapes["blocks.0.attention.projection.weight"] == (32, 32)
    assert shapes["blocks.0.output.mapping.weight"] == (32, 128)  # [in, out]
    assert shapes["blocks.0.output.mapping.bias"] == (128,)
    assert shapes["blocks.0.output.projection.weight"] == (128, 32)
    assert shapes["ln_f.beta"] == (32,)


def test_llama_names_and_shapes(configs: Mapping[str, Decoder]) -> None:
    shapes = expected_tensors(configs["llama"])
    assert len(shapes) == 2 + 9 * 2 + 1
    assert shapes["model.tok_embeddings.embedding_weight"] == (40, 32)
    assert shapes["model.layers.0.attention.wq.weight"] == (64, 32)  # 4 heads of 16
    assert shapes["model.layers.1.attention.wk.weight"] == (32, 32)  # 2 heads of 16
    assert shapes["model.layers.1.attention.wo.weight"] == (32, 64)
    assert shapes["model.layers.1.feed_forward.w1.weight"] == (96, 32)
    assert shapes["model.layers.1.feed_forward.w2.weight"] == (32, 96)
    assert shapes["model.norm_out.weight"] == (32,)
    assert shapes["lm_head.weight"] == (40, 32)


def test_qwen2_has_biases_and_no_head(configs: Mapping[str, Decoder]) -> None:
    shapes = expected_tensors(configs["qwen2"])
    assert shapes["model.layers.0.attention.wq.bias"] == (32,)
    assert shapes["model.layers.0.attention.wv.bias"] == (16,)
    assert "lm_head.weight" not in shapes


def test_gpt2_names_and_shapes(configs: Mapping[str, Decoder]) -> None:
    shapes = expected_tensors(configs["gpt2"])
    assert shapes["backbone.embedding.position_embedding.embedding_table"] == (64, 32)
    assert shapes["backbone.blocks.1.attention.dense1.bias"] == (32,)
    assert shapes["backbone.blocks.1.output.projection.weight"] == (128, 32)
    assert shapes["backbone.layernorm.gamma"] == (32,)


def test_every_canonical_tensor_has_its_own_source(config: Decoder) -> None:
    table = parameters(config)
    assert len({(item.hugging_face, item.part) for item in table}) == len(table)
    assert len({(item.gguf, item.part) for item in table}) == len(table)


def test_check_gives_counts_and_the_first_five() -> None:
    expected = {f"w{i}": (2, i) for i in range(9)}
    found = {f"x{i}": (1,) for i in range(3)} | {"w7": (7, 2), "w8": (2, 8)}
    with pytest.raises(ArtifactError) as caught:
        check_tensors(found, expected, "x.safetensors")
    lines = caught.value.message.splitlines()
    assert lines[0].startswith("x.safetensors: ") and "9 expected, 5 found" in lines[0]
    assert lines[1] == ("  - 7 missing: w0 [2, 0]; w1 [2, 1]; w2 [2, 2]; w3 [2, 3]; w4 [2, 4] ...")
    assert lines[2] == "  - 3 unexpected: x0 [1]; x1 [1]; x2 [1]"
    assert lines[3] == "  - 1 of the wrong shape: w7: got [7, 2], expected [2, 7]"
    assert "model=auto" in caught.value.hint


def test_check_accepts_what_fits(config: Decoder) -> None:
    shapes = expected_tensors(config)
    check_tensors(dict(reversed(shapes.items())), shapes, "anything")


def test_holds_every_tensor_of_the_model(config: Decoder) -> None:
    tensors = random_checkpoint(config, seed=3)
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected_tensors(config)
    for tensor in tensors.values():
        array = tensor.read()
        assert (array.dtype, array.shape, tensor.dtype) == (np.float32, tensor.shape, "F32")


def test_same_seed_same_values(config: Decoder) -> None:
    one, two = random_checkpoint(config, 1), random_checkpoint(config, 1)
    other = random_checkpoint(config, 2)
    for name in one:
        np.testing.assert_array_equal(one[name].read(), two[name].read())
        assert not np.array_equal(one[name].read(), other[name].read())


def test_a_tensor_does_not_depend_on_the_others(configs: Mapping[str, Decoder]) -> None:
    small = random_checkpoint(configs["llama"], 1)
    deep = random_checkpoint(resized(configs["llama"], num_layers=3), 1)
    for name, tensor in small.items():
        np.testing.assert_array_equal(tensor.read(), deep[name].read())
    values = [small[f"model.layers.{i}.attention.wq.weight"].read() for i in range(2)]
    assert not np.array_equal(*values)


def test_scale(configs: Mapping[str, Decoder]) -> None:
    tensors = random_checkpoint(configs["bloom"], 1)
    weight = tensors["blocks.0.output.mapping.weight"].read()
    assert 0.018 < weight.std() < 0.022 and abs(weight.mean()) < 0.002
    gain, shift = (tensors[f"embedding.norm.{kind}"].read() for kind in ("gamma", "beta"))
    assert abs(gain.mean() - 1) < 0.02 and 0 < gain.std() < 0.05
    assert abs(shift.mean()) < 0.02 and shift.std() > 0
    norm = random_checkpoint(configs["llama"], 1)["model.norm_out.weight"].read()
    assert abs(norm.mean() - 1) < 0.02
