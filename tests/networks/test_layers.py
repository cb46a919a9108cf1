from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from lite_runner.networks.layers import activation_of, parameter


def test_a_parameter_shares_the_memory_of_its_weights() -> None:
    """Else a model is in memory twice while it loads, and loading takes a copy longer."""
    values = np.zeros((3, 4), np.float32)
    held = parameter(values, "weight")
    values[1, 2] = 7
    assert held.asnumpy()[1, 2] == 7 and not held.requires_grad and held.name == "weight"


def test_a_read_only_view_of_a_file_will_do() -> None:
    values = np.arange(6, dtype=np.float32)
    values.setflags(write=False)
    assert np.array_equal(parameter(values, "weight").asnumpy(), values)


def test_the_quick_gelu_is_mindspores_fast_gelu() -> None:
    x = ms.Tensor(np.linspace(-8, 8, 999).astype(np.float32))
    expected = ms.nn.get_activation("fast_gelu")(x).asnumpy()
    np.testing.assert_allclose(activation_of("quick_gelu")(x).asnumpy(), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_other_types_are_rounded(dtype: ms.Type) -> None:
    held = parameter(np.array([[1.0, 1 / 3]], np.float32), "weight", dtype)
    assert held.dtype == dtype
    assert abs(float(held.astype(ms.float32).asnumpy()[0, 1]) - 1 / 3) < 2e-3
