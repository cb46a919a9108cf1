from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.schema import RunConfig

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
TINY = "model=tiny_llama"
MODEL = "model.model_config"
SAMPLED = f"{MODEL}.is_sample_acceleration=true"
PAST = f"{MODEL}.use_past=false"
PATHS = ("infer.prefill_model_path=d/a.mindir", "infer.increment_model_path=d/b.mindir")


@pytest.mark.parametrize(
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
            "is of export.layout=resizable, not of export.layout=auto, engine=graph-cell",
        ),
        (
            ["backend=mslite", "export.weight_fp16=true", "infer.model_type=mindir"],
            "needs infer.model_type=mindir_lite",
        ),
        (["backend=mslite", PAST, "export.layout=static_pair"], "static_pair has a cache"),
        (["backend=mslite", PAST, "quant=a16w8"], "quant=a16w8 has a cache"),
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
            "returns the argmax alone, no logits, so do_sample=true cannot be done",
        ),
        (["backend=mslite", SAMPLED, "num_beams=2"], "so num_beams=2 cannot be done"),
        (
            ["backend=mslite", SAMPLED, "repetition_penalty=1.2"],
            "so repetition_penalty=1.2 cannot be done",
        ),
        (["backend=mslite", SAMPLED, "min_new_tokens=2"], "so min_new_tokens=2 cannot be done"),
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
            "engine=native is backend=native; got backend=ms",
        ),
    ],
)
def test_conflicting_settings_are_refused(
    faults: Faults, settings: list[str], expected: str
) -> None:
    assert expected in faults(TINY, "predict_data=hi", *settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([*PATHS, PAST], "infer.increment_model_path: model.model_config.use_past=false writes"),
        (
            [*PATHS, "infer.model_type=mindir_lite"],
            "not of infer.prefill_model_path: MindSpore Lite 2.0, the one for CPUs, keeps no cache"
            " in a graph between runs",
        ),
        ([PAST, "infer.model_type=mindir_lite"], "not of model.model_config.use_past=false: Mind"),
        ([*PATHS, "export_output=x"], "both say where to write"),
        ([*PATHS, "export.layout=resizable"], "infer.prefill_model_path needs export.layout="),
        (
            [PATHS[0], "infer.increment_model_path=e/f/b.mindir"],
            "expected two names in one folder",
        ),
        ([PATHS[0], "infer.increment_model_path=d/a.mindir"], "expected two names in one folder"),
        ([PATHS[0], "infer.increment_model_path=d/a"], "expected two names in one folder"),
        ([PATHS[0], "infer.increment_model_path=d/b c.mindir"], "got the names ['a', 'b c']"),
        (["infer.model_dir=x"], "infer.model_dir is read; give export_output=FOLDER"),
    ],
)
def test_where_an_export_cannot_go(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(TINY, "run_mode=export", *settings)


def test_a_key_is_never_shown(faults: Faults) -> None:
    assert "secret" not in faults(TINY, "run_mode=export", "infer.enc_key=secret")


@pytest.mark.parametrize(
    "settings",
    [
        ["run_mode=export", *PATHS],
        ["run_mode=export", PATHS[0]],
        ["run_mode=export", PATHS[0], PAST],
        ["backend=mslite", "predict_data=hi", PAST],
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
