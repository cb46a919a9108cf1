from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lite_runner.config.schema import RunConfig
from lite_runner.sizing.need import Memory
from lite_runner.sizing.scaling import (
    Assumptions,
    degrees_of,
    rank_memory,
    rank_parameters,
    ranks_plan,
    scaling_estimate,
    traffic,
)
from lite_runner.system import memory
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.sharding.partition import cuts
from tests.models import model_named
from tests.sizes import resized

Resolve = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(("bloom_7.1b", 8), ("llama2_70b", 8), ("llama2_70b", 16), ("qwen2_7b", 4)),
        *(("smollm2_135m", 3), ("tiny_gpt2", 2), ("tiny_qwen2", 4), ("tiny_bloom", 1)),
    ],
)
def test_a_rank_holds_what_the_cuts_give_it(name: str, tensor: int) -> None:
    """Two ways to the same number: from the sizes, and from the tensors one by one."""
    model = model_named(name)
    shapes = expected_tensors(model)
    for vocab_parallel in (True, False):
        parts = cuts(model, tensor, vocab_parallel=vocab_parallel)
        assert rank_parameters(model, tensor, vocab_parallel=vocab_parallel) == sum(
            math.prod(shape) // parts[key].parts for key, shape in shapes.items()
        )


def test_cache_of_a_rank() -> None:
    model = model_named("llama2_70b")  # 8 key/value heads of 128, 80 layers
    assert rank_memory(model, "float16", 8, 2, 100).cache == 2 * 100 * 80 * 2 * 1 * 128 * 2
    # With more ranks than heads each holds a head.
    assert rank_memory(model, "float16", 16, 2, 100).cache == 2 * 100 * 80 * 2 * 1 * 128 * 2
    assert rank_memory(model, "float16", 8, 2, 100, use_past=False).cache == 0


def test_degrees() -> None:
    assert degrees_of(model_named("bloom_7.1b")) == [1, 2, 4, 8]
    assert degrees_of(model_named("llama2_70b")) == [1, 2, 4, 8]
    assert degrees_of(model_named("smollm2_135m")) == [1, 3]
    gpt2 = model_named("gpt2")  # 50257 tokens, 12 heads
    assert degrees_of(gpt2) == [1]
    assert degrees_of(gpt2, vocab_parallel=False) == [1, 2, 3, 4, 6]
    two_kv_heads = resized(model_named("llama2_70b"), n_kv_heads=2)
    assert degrees_of(two_kv_heads) == [1, 2, 4, 8]


def test_traffic_of_bloom() -> None:
    exchange = traffic(model_named("bloom_7.1b"), "float16", slots=3)
    assert exchange.reduces == 61
    assert exchange.reduced == 61 * 3 * 4096 * 2
    assert exchange.gathered == 3 * 250880 * 2
    given = Assumptions(link_rate=1e9, call_s=1e-3)
    sent = 2 * exchange.reduced * 3 / 4 + exchange.gathered * 3 / 4
    assert exchange.seconds(4, given) == pytest.approx(62e-3 + sent / 1e9)
    assert exchange.seconds(1, given) == pytest.approx(62e-3)  # nothing is sent to oneself


def test_the_table_names_its_assumptions() -> None:
    model = model_named("llama2_70b")
    lines = list(scaling_estimate(model, slots=1, length=4096))
    assert "an estimate, nothing is measured" in lines[0]
    assert "assumed: float16, 64 GB of memory at 1600 GB/s, links of 28 GB/s" in lines[1]
    rows = {int(line.split()[0]): line for line in lines[3:]}
    assert list(rows) == [1, 2, 4, 8]
    assert "138.0 GB" in rows[1] and rows[1].endswith("more than the memory assumed")
    assert "17.2 GB" in rows[8] and "more" not in rows[8]
    speed = [float(line.split(" ms")[1].split()[0]) for line in rows.values()]
    assert speed[0] == 1 and speed == sorted(speed) and speed[-1] < 8


@pytest.mark.parametrize(("free", "verdict"), [(4 * 10**9, "enough"), (3 * 10**9, "NOT enough")])
def test_the_plan_of_each_rank(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch, free: int, verdict: str
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    config = resolve("use_parallel=true", "parallel_config.model_parallel=3", "dry_run=true")
    model = model_named("smollm2_135m")
    rank = Memory(179_400_000, 7_900_000, process=500_000_000, work=100_000_000)
    lines = list(ranks_plan(config, model, rank, device="CPU", slots=2, length=256))
    assert "179.4 MB of weights, 7.9 MB of cache for 2 x 256 tokens" in lines[0]
    # Beside the ranks there are msrun and the scheduler, with 450 MiB each.
    assert "3 ranks of 787.3 MB each (weights 179.4 MB, cache 7.9 MB, the process" in lines[1]
    assert "and 943.7 MB for msrun: needs 3.3 GB" in lines[1]
    assert f"free: {verdict}" in lines[1]
    on_ascend = list(ranks_plan(config, model, rank, device="Ascend", slots=2, length=256))
    assert "179.4 MB of weights" in on_ascend[0] and "msrun" not in "".join(on_ascend)
