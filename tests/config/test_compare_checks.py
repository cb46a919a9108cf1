"""Backends that cannot be compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lite_runner.config.predict_options import PredictOptions
from lite_runner.config.schema import RunConfig
from lite_runner.evaluation.options import EvalOptions

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


EVAL = ("run_mode=eval", "model=tiny_llama", f"eval_data={__file__}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["compare_backend=ms"], "compare_backend=ms: got backend=ms, expected another one"),
        (["backend=auto", "compare_backend=ms"], "got backend=auto, expected another one by name"),
        (
            ["compare_backend=mslite"],
            "compare_backend=mslite: an exported graph gives the logits of the last token alone;"
            " expected backend=mslite engine=native, with the other one as compare_backend",
        ),
        (
            ["compare_backend=mindformers", "quant=a16w8"],
            "compare_backend=mindformers: quant: backend=mindformers has no quantized weights",
        ),
        (
            ["compare_backend=mindformers", "context.mode=1"],
            "compare_backend=mindformers: context.mode: backend=mindformers has no pynative mode",
        ),
        (
            [
                *("backend=mslite", "infer.model_dir=x", "compare_backend=ms"),
                "model.model_config.checkpoint_name_or_path=",
            ],
            "compare_backend=ms computes with the weights that the exported model was made from;"
            " load_checkpoint= names them",
        ),
    ],
)
def test_what_does_not_score_the_same(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*EVAL, *settings)


def test_what_does(resolve: Resolve) -> None:
    """The release is that of the other backend, too."""
    config = resolve(*EVAL, "compare_backend=mindformers", "mindformers.release=1.9.0")
    assert isinstance(config, EvalOptions) and config.names_mindformers
    packed = ("backend=mslite", "engine=native", "compare_backend=ms")
    assert isinstance(resolve(*EVAL, *packed), EvalOptions)


SLORA = ("run_mode=slora", "model=tiny_llama", "predict_data=x", "adapter_path=adapters.json")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["compare_backend=ms"], "compare_backend=ms: got backend=ms, expected another one"),
        (
            ["compare_backend=mindformers"],
            "compare_backend=mindformers: MindFormers has no adapters of each prompt, which"
            " run_mode=slora is for; expected ms, or mslite with engine=native",
        ),
        (["compare_backend=mslite"], "compare_backend=mslite: exported models have no adapters"),
    ],
)
def test_what_has_no_adapters(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*SLORA, *settings)


@pytest.mark.parametrize("run_mode", ["bench", "chat", "export", "serve"])
def test_other_run_modes_compare_nothing(faults: Faults, run_mode: str) -> None:
    said = faults(f"run_mode={run_mode}", "model=tiny_llama", "compare_backend=mslite")
    assert f"compare_backend has no effect with run_mode={run_mode}" in said
    assert all(name in said for name in ("run_mode=eval", "predict", "slora"))
