from __future__ import annotations

import numpy as np

from lite_runner.bench.random_adapters import random_adapters
from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve


def test_every_linear_layer_has_a_pair_of_its_own_values() -> None:
    model = resolve(parse(["model=tiny_llama", "predict_data=x"], heads()))[0].model_config()
    assert model is not None
    first, second = random_adapters(model, 2, rank=4)
    assert (first.name, second.name) == ("a0", "a1")
    assert len(first.pairs) == 7 * model.num_layers
    seen = set()
    for adapter in (first, second):
        for pair in adapter.pairs.values():
            assert pair.rank == 4 and pair.a.shape[0] == pair.b.shape[1] == 4
            a, b = pair.values()
            assert (a.shape, b.shape) == (pair.a.shape, pair.b.shape)
            assert np.isfinite(a).all() and b.any()
            assert np.array_equal(pair.a.read(), a)  # the same whenever they are read
            seen.add(a.tobytes())
    assert len(seen) == 2 * len(first.pairs)
