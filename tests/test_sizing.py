"""Parameters, memory and the communication of ranks, against published and written numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from lite_runner.config.groups import options_of
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import Ranks
from lite_runner.errors import EnvironmentFault
from lite_runner.sizing import (
    Assumptions,
    Memory,
    MemoryHint,
    cache_bytes,
    check_memory,
    degrees_of,
    float32_bytes,
    parameter_count,
    rank_memory,
    rank_parameters,
    ranks_plan,
    scaling_estimate,
    traffic,
)
from lite_runner.system import memory
from lite_runner.system.files import readable
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.sharding.partition import strategy_of
from tests.each import each
from tests.models import model_named
from tests.paths import FIXTURES
from tests.sizes import resized

Resolve = Callable[..., RunConfig]


PUBLISHED: dict[str, Any] = json.loads(
    (FIXTURES / "published_parameters.json").read_text(encoding="utf-8")
)["models"]


def test_every_model_with_weights_has_a_published_count() -> None:
    named = {name for name in options_of("model") if name != "auto" and "tiny" not in name}
    assert named == PUBLISHED.keys()


def test_parameter_counts_are_the_published_ones(subtests: pytest.Subtests) -> None:
    for name in [name for name, one in PUBLISHED.items() if one["stated"]]:
        with subtests.test(name=name):
            stated = PUBLISHED[name]["stated"]
            count = parameter_count(model_named(name)) + sum(
                PUBLISHED[name].get("more", {}).values()
            )
            if isinstance(stated, str):  # rounded to the digits that are there
                digits = len(stated.partition(".")[2].rstrip("BM"))
                count = f"{count / (1e9 if stated.endswith('B') else 1e6):.{digits}f}{stated[-1]}"
            assert count == stated


def test_memory_of_weights_and_cache() -> None:
    model = model_named("smollm2_135m")
    cache = cache_bytes(model, "float32", 8, 256)
    assert float32_bytes(model) == 134_515_008 * 4
    assert cache == 8 * 256 * 30 * 2 * 3 * 64 * 4
    assert cache_bytes(model, "float16", 8, 256) * 2 == cache
    assert Memory(float32_bytes(model), cache).total == float32_bytes(model) + cache


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 100)
    check_memory(Memory(60, 40))
    smaller = MemoryHint("quant=a16w4", Memory(30, 41))
    with pytest.raises(EnvironmentFault) as caught:
        check_memory(Memory(60, 41), lambda: [smaller])
    assert "needs 101 B (weights 60 B, cache 41 B), but 100 B is free" in caught.value.message
    assert caught.value.hint.startswith("quant=a16w4 would need 71 B; or a smaller model")
    assert caught.value.exit_code == 3


def test_the_peak_is_in_loading_or_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Memory(100, 20, 5, process=50, loading=10, work=7)
    assert (need.total, need.held) == (50 + 100 + 32, 125)
    assert Memory(100, 20, process=50, loading=90, work=7).total == 240
    assert "more while loading 63 B" in Memory(100, 20, process=50, loading=90, work=7).parts()
    # What the process has already is not needed once more.
    monkeypatch.setattr(memory, "resident", lambda: 30)
    monkeypatch.setattr(memory, "free_memory", lambda: need.total - 30)
    check_memory(need)
    monkeypatch.setattr(memory, "free_memory", lambda: need.total - 31)
    with pytest.raises(EnvironmentFault, match="but 181 B is free"):
        check_memory(need)


def test_sizes_for_people() -> None:
    assert [readable(n) for n in (999, 538_100_000, 4 * 10**12)] == ["999 B", "538.1 MB", "4.0 TB"]


@each(
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
        ranks = Ranks(tensor=tensor)
        layouts = strategy_of(model, ranks, vocab_parallel=vocab_parallel).layouts
        assert rank_parameters(model, tensor, vocab_parallel=vocab_parallel) == sum(
            math.prod(shape) // math.prod(layouts[key].parts) for key, shape in shapes.items()
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
    cluster, sizes = config.cluster, {"slots": 2, "length": 256}
    asked = {"use_past": True, "vocab_parallel": True}
    lines = list(ranks_plan(cluster, model, rank, device="CPU", **sizes, **asked))
    assert "179.4 MB of weights, 7.9 MB of cache for 2 x 256 tokens" in lines[0]
    # Beside the ranks there are msrun and the scheduler, with 450 MiB each.
    assert "3 ranks of 787.3 MB each (weights 179.4 MB, cache 7.9 MB, the process" in lines[1]
    assert "and 943.7 MB for msrun: needs 3.3 GB" in lines[1]
    assert f"free: {verdict}" in lines[1]
    on_ascend = list(ranks_plan(cluster, model, rank, device="Ascend", **sizes, **asked))
    assert "179.4 MB of weights" in on_ascend[0] and "msrun" not in "".join(on_ascend)
