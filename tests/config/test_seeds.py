from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.config.schema import RunConfig
from lite_runner.config.seeds import with_seed
from lite_runner.errors import ConfigError

Resolve = Callable[..., RunConfig]
SAMPLING = ("model=tiny_llama", "predict_data=x", "do_sample=true")


def test_a_seed_that_nobody_gave_is_another_each_time(resolve: Resolve) -> None:
    config = resolve(*SAMPLING)
    drawn = [with_seed(config).seed for _ in range(4)]
    assert config.seed is None and len(set(drawn)) == 4
    assert all(seed is not None and 0 <= seed < 2**32 for seed in drawn)


def test_random_weights_stay_what_they_were(resolve: Resolve) -> None:
    config = with_seed(resolve(*SAMPLING))
    assert config.checkpoint_seed == 0
    assert run_modes.from_dict(config.to_dict()) == config  # the run that is written repeats
    assert resolve(*SAMPLING, "seed=5").checkpoint_seed == 5
    assert with_seed(resolve(*SAMPLING, "weights_seed=7")).checkpoint_seed == 7


def test_a_prompt_of_its_own_may_sample(resolve: Resolve) -> None:
    Path("p.jsonl").write_text('{"prompt": "x", "do_sample": true}')
    Path("greedy.jsonl").write_text('{"prompt": "x"}')
    inline = "predict_data=[a, {prompt: x, do_sample: true}]"
    assert with_seed(resolve("model=tiny_llama", inline)).seed is not None
    for name, drawn in (("p", True), ("greedy", False)):
        config = resolve("model=tiny_llama", f"predict_data={name}.jsonl")
        assert (with_seed(config).seed is not None) is drawn
    by_hand = ["model=tiny_llama", "predict_data=p.jsonl", "backend=mslite", "infer.rank_id=1"]
    with pytest.raises(ConfigError, match="get the seed that another process draws"):
        resolve(*by_hand)
    assert resolve(*by_hand, "seed=1").seed == 1


def test_only_what_samples_needs_a_seed(resolve: Resolve) -> None:
    for config in (
        resolve("model=tiny_llama", "predict_data=x"),
        resolve(*SAMPLING, "seed=0"),
        resolve("model=tiny_llama", "run_mode=export"),
    ):
        assert with_seed(config) == config
