"""What backend=mindformers refuses before anything is loaded, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lite_runner.config.generate_checks import PredictOptions
from lite_runner.config.schema import RunConfig
from lite_runner.run_modes.eval import Config as EvalConfig

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
LINE = ("model=tiny_llama", "predict_data=x", "backend=mindformers")
PAST = "model.model_config.use_past"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["stop=x"], "stop: backend=mindformers has no stop strings"),
        (["adapter_path=x"], "adapter_path: backend=mindformers has no adapters of each prompt"),
        (["quant=a16w8"], "quant: backend=mindformers has no quantized weights"),
        (["kv_cache=int8"], "kv_cache: backend=mindformers"),
        (["context.mode=1"], "context.mode: backend=mindformers has no pynative mode"),
        (["model.model_config.compute_dtype=bfloat16"], "has no bfloat16"),
        (["logprobs=1"], "logprobs: backend=mindformers has no log-probabilities"),
        (["prompt_logprobs=1"], "prompt_logprobs: backend=mindformers"),
        (["do_sample=true", "min_p=0.1"], "min_p: backend=mindformers has no min_p"),
        (["min_new_tokens=2"], "min_new_tokens: backend=mindformers"),
        (["presence_penalty=1"], "presence_penalty: backend=mindformers"),
        (["do_sample=true", "num_return_sequences=2"], "no several texts of a prompt"),
        (["num_beams=2", f"{PAST}=false", "length_penalty=2"], "length_penalty: backend="),
        (["num_beams=2"], f"beam search has no cache; add {PAST}=false"),
        (
            ["parallel=dp2tp2"],
            "together need backend=ms: MindFormers shares one replica of a model",
        ),
        (["mindformers.release=1.3.2"], "mindformers.release: got '1.3.2', expected one of"),
        (["engine=lite"], "engine has an effect only with backend=mslite"),
    ],
)
def test_options_that_mindformers_lacks(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*LINE, *settings)


@pytest.mark.parametrize(
    "line",
    [
        ["run_mode=bench", "bench_models=[tiny_llama]"],
        ["run_mode=slora", "predict_data=x", "adapter_path=adapters.json"],
        ["run_mode=convert", "convert_output=x.ckpt"],
    ],
)
def test_run_modes_that_it_lacks(faults: Faults, line: list[str]) -> None:
    said = faults("model=tiny_llama", "backend=mindformers", *line)
    assert f"backend=mindformers is not available with {line[0]}" in said


EXPORT = ("run_mode=export", "model=tiny_bloom", "backend=mindformers")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            [],
            f"its pair of graphs with a cache, which MindSpore 2.0 writes, runs in no engine here;"
            f" add {PAST}=false",
        ),
        (["engine=graph-cell"], "engine: backend=mindformers exports one graph of float32"),
        (["export.layout=resizable"], "export.layout: backend=mindformers exports one graph"),
        (["infer.model_type=mindir_lite"], "infer.model_type: backend=mindformers exports one"),
        (
            ["export.weight_fp16=true", "infer.model_type=mindir_lite"],
            "export.weight_fp16: backend",
        ),
        (["quant=a16w8"], "quant: backend=mindformers has no quantized weights"),
        (["adapter_path=x"], "adapter_path: backend=mindformers has no adapters"),
        (["parallel=tp2"], "parallel_config.model_parallel: backend=mindformers has no ranks that"),
    ],
)
def test_options_that_mindformers_does_not_export(
    faults: Faults, settings: list[str], expected: str
) -> None:
    assert expected in faults(*EXPORT, *settings)


def test_replicas_are_ranks_of_their_own(resolve: Resolve) -> None:
    line = ("model=tiny_bloom", "predict_data=[x,y]", "backend=mindformers", "parallel=dp2")
    assert resolve(*line).use_parallel


def test_options_that_mindformers_exports(resolve: Resolve) -> None:
    assert resolve(*EXPORT, f"{PAST}=false", "engine=lite-worker").backend == "mindformers"


def test_a_release_without_mindformers(faults: Faults, resolve: Resolve) -> None:
    line = ("model=tiny_llama", "predict_data=x", "mindformers.release=1.9.0")
    said = faults(*line)
    assert "mindformers.release=1.9.0 has an effect only with backend=mindformers" in said
    assert resolve(*line, "compare_backend=mindformers").run_mode == "predict"


def test_options_that_mindformers_has(resolve: Resolve) -> None:
    sampled = ("do_sample=true", "temperature=0.5", "top_k=3", "top_p=0.9", "seed=1")
    for settings in (
        sampled,
        ("num_beams=3", f"{PAST}=false"),
        ("repetition_penalty=1.2", "predict_batch_size=2", "eos_token_id=[1,2]"),
        ("compare_backend=ms", "compare_tolerance=0"),
    ):
        assert resolve(*LINE, *settings).backend == "mindformers"


COMPARE_LINE = ("model=tiny_llama", "predict_data=x")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["compare_backend=ms", "backend=ms"],
            "compare_backend=ms: got backend=ms, expected another one",
        ),
        (["compare_backend=auto"], "got backend=auto, expected another one by name"),
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
def test_comparisons_that_are_refused(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*COMPARE_LINE, *settings)


def test_the_defaults(resolve: Resolve) -> None:
    config = resolve(*COMPARE_LINE)
    assert isinstance(config, PredictOptions)
    assert (config.compare_backend, config.compare_tolerance) == (None, None)
    assert config.tolerance == 0.05
    given = resolve(*COMPARE_LINE, "compare_tolerance=0")
    assert isinstance(given, PredictOptions) and given.tolerance == 0


EVAL = ("run_mode=eval", "model=tiny_llama", f"eval_data={__file__}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["compare_backend=ms", "backend=ms"],
            "compare_backend=ms: got backend=ms, expected another one",
        ),
        (["compare_backend=auto"], "got backend=auto, expected another one by name"),
        (
            ["compare_backend=mslite"],
            "compare_backend=mslite: an exported graph gives the logits of the last token alone;"
            " expected native or ms",
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
def test_scores_that_are_not_compared(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*EVAL, *settings)


def test_scores_that_are_compared(resolve: Resolve) -> None:
    """The release is that of the other backend, too."""
    config = resolve(*EVAL, "compare_backend=mindformers", "mindformers.release=1.9.0")
    assert isinstance(config, EvalConfig) and config.names_mindformers
    assert isinstance(resolve(*EVAL, "backend=native", "compare_backend=ms"), EvalConfig)


SLORA = ("run_mode=slora", "model=tiny_llama", "predict_data=x", "adapter_path=adapters.json")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["compare_backend=ms", "backend=ms"],
            "compare_backend=ms: got backend=ms, expected another one",
        ),
        (
            ["compare_backend=mindformers"],
            "compare_backend=mindformers: MindFormers has no adapters of each prompt, which"
            " run_mode=slora is for; expected native or ms",
        ),
        (["compare_backend=mslite"], "compare_backend=mslite: exported models have no adapters"),
    ],
)
def test_backends_without_adapters(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*SLORA, *settings)


@pytest.mark.parametrize("run_mode", ["bench", "chat", "export", "serve"])
def test_other_run_modes_compare_nothing(faults: Faults, run_mode: str) -> None:
    said = faults(f"run_mode={run_mode}", "model=tiny_llama", "compare_backend=mslite")
    assert f"compare_backend has no effect with run_mode={run_mode}" in said
    assert all(name in said for name in ("run_mode=eval", "predict", "slora"))
