"""Validation errors of backend=mindformers, exported models and comparisons, before loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.checks import PredictOptions
from lite_runner.config.schema import RunConfig
from lite_runner.run_modes.eval import Config as EvalConfig
from tests.each import each

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
LINE = ("model=tiny_llama", "predict_data=x", "backend=mindformers")
PAST = "model.model_config.use_past"


@each(
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
    errors = faults("model=tiny_llama", "backend=mindformers", *line)
    assert f"backend=mindformers is not available with {line[0]}" in errors


EXPORT = ("run_mode=export", "model=tiny_bloom", "backend=mindformers")


@each(
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
    errors = faults(*line)
    assert "mindformers.release=1.9.0 has an effect only with backend=mindformers" in errors
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


@each(
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
    errors = faults(f"run_mode={run_mode}", "model=tiny_llama", "compare_backend=mslite")
    assert f"compare_backend has no effect with run_mode={run_mode}" in errors
    assert all(name in errors for name in ("run_mode=eval", "predict", "slora"))


TINY = "model=tiny_llama"
MODEL = "model.model_config"
SAMPLED = f"{MODEL}.is_sample_acceleration=true"
WITHOUT_CACHE = f"{MODEL}.use_past=false"
PATHS = ("infer.prefill_model_path=d/a.mindir", "infer.increment_model_path=d/b.mindir")


@each(
    ("settings", "expected"),
    [
        (
            ["engine=graph-cell", "backend=ms"],
            "engine has an effect only with backend=mslite or run_mode=export",
        ),
        (
            ["export.layout=resizable", "backend=ms"],
            "export.layout has an effect only with backend=mslite",
        ),
        (
            ["infer.model_dir=x", "backend=native"],
            "infer.model_dir has an effect only with backend=mslite",
        ),
        (
            ["backend=mslite", "export.layout=static_pair", "engine=lite-worker"],
            "export.layout=static_pair runs in engine=lite or graph-cell, not lite-worker",
        ),
        (
            ["backend=mslite", "infer.model_type=mindir_lite", "engine=graph-cell"],
            "needs export.layout=resizable, got export.layout=auto, engine=graph-cell",
        ),
        (
            ["backend=mslite", "export.weight_fp16=true", "infer.model_type=mindir"],
            "needs infer.model_type=mindir_lite",
        ),
        (["backend=mslite", WITHOUT_CACHE, "export.layout=static_pair"], "static_pair has a cache"),
        (["backend=mslite", WITHOUT_CACHE, "quant=a16w8"], "quant=a16w8 has a cache"),
        (
            ["infer.model_type=mindir_lite", "backend=ms"],
            "infer.model_type has an effect only with",
        ),
        (
            ["infer.infer_seq_length=5", "backend=ms"],
            "infer.infer_seq_length has an effect only with",
        ),
        (["export.target=Ascend", "backend=ms"], "export.target has an effect only with"),
        (["infer.enc_key=0123456789abcdef", "backend=ms"], "infer.enc_key has an effect only with"),
        ([SAMPLED, "backend=ms"], "is_sample_acceleration has an effect only with"),
        (
            ["backend=mslite", "infer.rank_id=1", "do_sample=true"],
            "give all of them the same: seed=1",
        ),
        (
            ["backend=mslite", SAMPLED, "do_sample=true"],
            "returns the argmax alone, no logits, which rules out do_sample=true",
        ),
        (["backend=mslite", SAMPLED, "num_beams=2"], "which rules out num_beams=2"),
        (
            ["backend=mslite", SAMPLED, "repetition_penalty=1.2"],
            "which rules out repetition_penalty=1.2",
        ),
        (["backend=mslite", SAMPLED, "min_new_tokens=2"], "which rules out min_new_tokens=2"),
        (
            ["backend=mslite", SAMPLED, "export.layout=resizable"],
            "is_sample_acceleration needs export.layout=static_pair; got resizable",
        ),
        (
            ["backend=mslite", "export.target=Ascend", "export.layout=resizable"],
            "export.target=Ascend needs export.layout=static_pair; got resizable",
        ),
        (
            ["backend=mslite", "export.layout=resizable", "infer.enc_key=0123456789abcdef"],
            "infer.enc_key needs export.layout=static_pair",
        ),
        (["backend=mslite", "infer.enc_key=short"], "infer.enc_key: got 5 bytes, expected one of"),
        (["backend=mslite", "infer.enc_key=env:NO_SUCH"], "no environment variable NO_SUCH"),
        (
            ["backend=mslite", "infer.increment_model_path=a.mindir"],
            "the second of a pair; infer.prefill_model_path is empty",
        ),
        (["backend=mslite", "infer.model_dir=d", *PATHS], "both say which model"),
        (["backend=mslite", "infer.infer_seq_length=1000"], "at most the model's context of 256"),
        (
            ["backend=ms", "engine=native"],
            "engine: got 'native', expected one of auto, lite, lite-worker, graph-cell",
        ),
    ],
)
def test_conflicting_settings_are_refused(
    faults: Faults, settings: list[str], expected: str
) -> None:
    assert expected in faults(TINY, "predict_data=hi", *settings)


@each(
    ("settings", "expected"),
    [
        (
            [*PATHS, WITHOUT_CACHE],
            "infer.increment_model_path: model.model_config.use_past=false writes",
        ),
        (
            [*PATHS, "infer.model_type=mindir_lite"],
            "got infer.prefill_model_path: MindSpore Lite 2.0, the one for CPUs, keeps no cache"
            " in a graph between runs",
        ),
        (
            [WITHOUT_CACHE, "infer.model_type=mindir_lite"],
            "got model.model_config.use_past=false: Mind",
        ),
        ([*PATHS, "export_output=x"], "both say where to write"),
        ([*PATHS, "export.layout=resizable"], "infer.prefill_model_path needs export.layout="),
        ([PATHS[0], "infer.increment_model_path=e/f/b.mindir"], "expected two names in one folder"),
        ([PATHS[0], "infer.increment_model_path=d/a.mindir"], "expected two names in one folder"),
        ([PATHS[0], "infer.increment_model_path=d/a"], "expected two names in one folder"),
        ([PATHS[0], "infer.increment_model_path=d/b c.mindir"], "got the names ['a', 'b c']"),
        (["infer.model_dir=x"], "infer.model_dir= names a model to run; give export_output=FOLDER"),
    ],
)
def test_invalid_export_paths(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(TINY, "run_mode=export", *settings)


def test_a_key_is_never_shown(faults: Faults) -> None:
    assert "secret" not in faults(TINY, "run_mode=export", "infer.enc_key=secret")


@each(
    "settings",
    [
        ["run_mode=export", *PATHS],
        ["run_mode=export", PATHS[0]],
        ["run_mode=export", PATHS[0], WITHOUT_CACHE],
        ["backend=mslite", "predict_data=hi", WITHOUT_CACHE],
        ["run_mode=export", SAMPLED, "export.layout=static_pair"],
        ["backend=auto", "predict_data=hi"],
        ["backend=mslite", "predict_data=hi", SAMPLED],
        ["backend=mslite", "predict_data=hi", "infer.prefill_model_path=one.mindir"],
    ],
)
def test_matching_settings_are_taken(resolve: Resolve, settings: list[str]) -> None:
    resolve(TINY, *settings)


def test_a_yaml_that_exports_goes_where_run_mindformer_writes(
    resolve: Resolve, tmp_path: Path
) -> None:
    """The yaml's own run_mode, or MindFormers' flag; ours and our keys keep our places."""
    file = tmp_path / "run.yaml"
    text = "trainer: {model_name: tiny_bloom}\nmodel: {arch: {type: BloomLMHeadModel}}\n"

    def places(*settings: str) -> tuple[str, str, bool | None]:
        config = resolve("--config", str(file), *settings)
        infer = config.infer
        return infer.prefill_model_path, infer.increment_model_path, config.overwrite

    there = tuple(f"output/mindir_{name}_checkpoint/rank_0" for name in ("full", "inc"))
    file.write_text(text)
    assert places("--run_mode", "export") == (f"./{there[0]}", f"./{there[1]}", True)
    assert places("run_mode=export") == ("", "", False)
    file.write_text(text + "run_mode: export\n")
    assert places() == (f"./{there[0]}", f"./{there[1]}", True)
    assert places("export_output=x") == places("export.layout=resizable") == ("", "", False)
    no_past = text.replace("}}\n", "}, model_config: {use_past: false}}\n")
    file.write_text(no_past + "run_mode: export\n")
    assert places() == (f"./{there[0]}", "", True)
    file.write_text(text + "run_mode: export\noutput_dir: ./elsewhere\n")
    assert places("overwrite=false")[0] == "./elsewhere/mindir_full_checkpoint/rank_0"
