"""Backends that cannot be compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lite_runner.config.predict_options import PredictOptions
from lite_runner.config.schema import RunConfig

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
LINE = ("model=tiny_llama", "predict_data=x")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["compare_backend=ms"], "compare_backend=ms: got backend=ms, expected another one"),
        (["compare_backend=mslite", "backend=auto"], "got backend=auto, expected another one"),
        (["compare_backend=mslite", "parallel=dp2"], "compare_backend=mslite is for one process"),
        (
            ["compare_backend=mindformers", "do_sample=true"],
            "MindFormers draws other tokens than lite-runner; do_sample=false compares",
        ),
        (
            ["compare_backend=ms", "backend=mindformers", "do_sample=true"],
            "compare_backend=ms: MindFormers draws other tokens",
        ),
        (
            ["compare_backend=mindformers", "stop=x"],
            "compare_backend=mindformers: stop: backend=mindformers has no stop strings",
        ),
        (
            ["compare_backend=mslite", "model.model_config.use_past=false"],
            "compare_backend=mslite: exported models have no use_past=false",
        ),
        (["compare_backend=other"], "compare_backend: got"),
        (["compare_tolerance=-1"], "compare_tolerance: got"),
    ],
)
def test_what_cannot_be(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*LINE, *settings)


def test_the_defaults(resolve: Resolve) -> None:
    config = resolve(*LINE)
    assert isinstance(config, PredictOptions)
    assert (config.compare_backend, config.compare_tolerance) == (None, None)
    assert config.tolerance == 0.05
    given = resolve(*LINE, "compare_tolerance=0")
    assert isinstance(given, PredictOptions) and given.tolerance == 0


def test_it_is_for_predict(faults: Faults) -> None:
    said = faults("run_mode=eval", "model=tiny_llama", "eval_data=x", "compare_backend=ms")
    assert "compare_backend" in said and "run_mode=predict" in said
