from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.random import random_checkpoint
from tests.sizes import resized


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
