from __future__ import annotations

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, jobs_of


def jobs(*args: str) -> list[tuple[str, RunConfig, list[str]]]:
    return jobs_of(parse(args, heads()))


def test_every_combination_is_a_job() -> None:
    found = jobs("model=tiny_llama,tiny_gpt2", "seed=range(1,3)", "predict_data=a, b")
    assert [(label, config.seed) for label, config, _ in found] == [
        ("model=tiny_llama seed=1", 1),
        ("model=tiny_llama seed=2", 2),
        ("model=tiny_gpt2 seed=1", 1),
        ("model=tiny_gpt2 seed=2", 2),
    ]
    assert {config.predict_data for _, config, _ in found} == {"a, b"}


def test_a_glob_picks_options() -> None:
    labels = [label for label, _, _ in jobs("model=glob(tiny_*)", "predict_data=x")]
    assert labels == [f"model=tiny_{name}" for name in ("bloom", "gpt2", "llama", "qwen2")]


def test_without_a_sweep_there_is_one_job() -> None:
    [(label, config, _)] = jobs("model=tiny_llama", "predict_data=['a','b']", "stop=x,y")
    assert label == "" and config.predict_data == ("a", "b") and config.stop == "x,y"


def test_the_faults_of_all_jobs_come_before_the_first_runs() -> None:
    with pytest.raises(ConfigError) as caught:
        jobs("model=tiny_llama", "predict_data=x", "temperature=0,nan", "do_sample=true", "foo=1")
    message = caught.value.message
    assert "temperature=0: " in message and "temperature=nan: " in message and "foo=1" in message


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["seed=interval(0,1)"], "an interval has no list"),
        (["seed=range(0,100000)"], "got 100000 jobs"),
        (["model=glob(none_*)"], "got 0 jobs"),
        (["seed=1,2", "predict_data=-"], "read by one job only"),
    ],
)
def test_what_cannot_be_swept_is_refused(args: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        jobs("model=tiny_llama", *args)
