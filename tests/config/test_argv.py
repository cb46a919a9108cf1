from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.config.argv import CommandLine, Setting, parse
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from tests.each import each

HEADS = ("model", "seed", "predict_data", "run_mode", "load_checkpoint", "context")


def parsed(*args: str) -> CommandLine:
    return parse(args, HEADS)


def test_the_first_equals_sign_ends_the_key() -> None:
    line = parsed("predict_data=a=b=c", "model=gpt2")
    assert line.settings == [Setting("predict_data", "a=b=c"), Setting("model", "gpt2")]
    assert line.action == "run" and not line.errors


@pytest.mark.parametrize("prefix", ["+", "++", "~"])
def test_hydras_prefixes_are_kept_apart(prefix: str) -> None:
    assert parsed(f"{prefix}seed=3").settings == [Setting("seed", "3", prefix)]


@each(
    ("args", "action"),
    [
        (["--help"], "help"),
        (["-h", "model=x"], "help"),
        (["--version"], "version"),
        (["--cfg", "job"], "cfg"),
        (["-c", "job"], "cfg"),
        (["--cfg=job"], "cfg"),
        (["-m", "seed=1,2"], "multirun"),
        (["seed=1,2", "--multirun"], "multirun"),
        (["-sc", "install=bash"], "completion"),
        (["--shell-completion=install=bash"], "completion"),
    ],
)
def test_actions(args: list[str], action: str) -> None:
    line = parsed(*args)
    assert line.action == action and line.errors == []


def test_flags_of_run_mindformer() -> None:
    line = parsed(
        *("--config", "f.yaml", "--run_mode", "predict", "--device_target", "CPU", "--mode=0"),
        *("--predict_data", "one\\ntwo", "three", "seed=1", "--options", "a.b=c", "d=e"),
    )
    assert line.errors == []
    assert line.config_files == ["f.yaml"]
    assert line.settings == [
        Setting("run_mode", "predict", flag=True),
        Setting("context.device_target", "CPU", flag=True),
        Setting("context.mode", "0", flag=True),
        Setting("predict_data", ["one\ntwo", "three"]),
        Setting("seed", "1"),
        Setting("a.b", "c"),
        Setting("d", "e"),
    ]


def test_a_text_of_predict_data_that_looks_like_a_setting_stays_a_text() -> None:
    assert parsed("--predict_data", "seed=1").settings == [Setting("predict_data", "seed=1")]
    line = parsed("--predict_data", "x", "y=2")
    assert line.settings == [Setting("predict_data", ["x", "y=2"])]
    line = parsed("--predict_data", "x", "sead=2")
    assert line.settings == [Setting("predict_data", "x"), Setting("sead", "2")]


def test_a_single_dash_is_a_value() -> None:
    assert parsed("--predict_data", "-").settings == [Setting("predict_data", "-")]
    assert parsed("--seed", "-1").settings == [Setting("seed", "-1", flag=True)]


def test_config_name_is_hydras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    Path("conf/mine.yaml").touch()
    assert parsed("-cd", "conf", "--config-name", "mine").config_files == ["conf/mine.yaml"]
    assert parsed("-cp", "conf", "-cn", "mine.yaml").config_files == ["conf/mine.yaml"]
    assert parsed("-cd", "conf", "-cn", "other").config_files == ["conf/other.yaml"]
    Path("other.yaml").touch()
    assert parsed("-cd", "conf", "--config-name=other").config_files == ["other.yaml"]
    # Laid under the files of --config.
    both = parsed("--config", "over.yaml", "-cd", "conf", "-cn", "mine")
    assert both.config_files == ["conf/mine.yaml", "over.yaml"]


@each(
    ("args", "fault"),
    [
        (["--seeed", "3"], "--seeed: no such flag; did you mean --seed?"),
        (["--predictdata", "x y"], "did you mean --predict_data?"),
        (["--multi-run"], "did you mean --multirun?"),
        (["-x"], "-x: no such flag"),
        (["--seed"], "--seed: expected a value after it"),
        (["--config", "--run_mode", "predict"], "--config: expected a value"),
        (["--cfg", "every"], "--cfg: got 'every', expected job, hydra, all"),
        (
            ["-c", "4096"],
            "-c: got '4096', expected job, hydra, all, schema; the length of a context is",
        ),
        (["--config-dir"], "--config-dir: expected a folder"),
        (["--prompt", "a b"], "--prompt: no such flag; here it is predict_data='TEXT'"),
        (["--model-path=x.gguf"], "--model-path: no such flag; here it is model=PATH"),
        (["-p", "a b"], "-p: no such flag; here it is predict_data='TEXT'"),
        (["-n", "4"], "-n: no such flag; here it is max_new_tokens=N"),
        (["--enc_kye=SECRET"], "--enc_kye: no such flag"),
        (["--json"], "--json: no such flag; here it is output_format=jsonl"),
        (["--config-name"], "--config-name: expected a name"),
        (["-cp", "my_conf"], "--config-path: expected --config-name NAME"),
        (["sweep_metric=peak_rss_mib"], "sweep_metric has no effect without --multirun"),
        (["-m", "--cfg", "job"], "leave out --multirun"),
        (["--cfg", "job", "-m"], "leave out --multirun"),
    ],
)
def test_unknown_words_are_errors(args: list[str], fault: str) -> None:
    faults = parsed(*args).errors
    assert len(faults) == 1 and fault in faults[0]


def test_a_value_after_an_unknown_flag_is_not_a_second_fault() -> None:
    line = parsed("--seeed", "3", "seed=4")
    assert len(line.errors) == 1
    assert line.settings == [Setting("seed", "4")]


# Every option of run_mindformer.py in releases 1.0 to 2.1 (and input_data, vocab_file of documents
# before them) -> a value, and the message about it; "" where it is taken.
MINDFORMERS_FLAGS = {
    "mode": ("0", ""),
    "device_id": ("0", ""),
    "device_target": ("CPU", ""),
    "run_mode": ("predict", ""),
    "do_eval": ("True", ""),
    "train_dataset_dir": ("d", ""),
    "eval_dataset_dir": ("d", ""),
    "predict_data": ("hello", ""),
    "input_data": ("hello", ""),
    "modal_type": ("text", ""),
    "predict_batch_size": ("2", ""),
    "adapter_id": ("a", "adapter_id needs adapter_path"),
    "load_checkpoint": ("random", ""),
    "src_strategy_path_or_dir": ("s", "has no effect with load_checkpoint=random"),
    "auto_trans_ckpt": ("True", ""),
    "transform_process_num": ("2", ""),
    "only_save_strategy": ("False", ""),
    "resume_training": ("True", ""),
    "strategy_load_checkpoint": ("s", ""),
    "register_path": ("d", ""),
    "remote_save_url": ("u", ""),
    "seed": ("3", ""),
    "use_parallel": ("False", ""),
    "profile": ("False", ""),
    "options": ("seed=3", ""),
    "epochs": ("2", ""),
    "batch_size": ("2", ""),
    "gradient_accumulation_steps": ("2", ""),
    "sink_mode": ("True", ""),
    "num_samples": ("2", ""),
    "output_dir": ("o", ""),
    "do_sample": ("True", ""),
    "trust_remote_code": ("False", ""),
    "vocab_file": ("v", ""),
}


def test_every_flag_of_run_mindformer(subtests: pytest.Subtests) -> None:
    for flag in MINDFORMERS_FLAGS:
        with subtests.test(flag=flag):
            value, expected = MINDFORMERS_FLAGS[flag]
            args = [
                "model=tiny_llama",
                "load_checkpoint=random",
                "predict_data=hi",
                f"--{flag}",
                value,
            ]
            try:
                resolve(parse(args, heads()))
                message = ""
            except ConfigError as error:
                message = error.message
            assert expected in message if expected else not message


def test_flags_without_their_value() -> None:
    assert "expected text" in parse(["--modal_type", "image"], heads()).errors[0]


def test_old_names_of_flags() -> None:
    line = parse(["--input_data", "a\\nb", "--vocab_file", "t.model"], heads())
    settings = {setting.key: setting.value for setting in line.settings}
    assert settings == {"predict_data": "a\nb", "processor.tokenizer.tokenizer_file": "t.model"}


def test_flags_of_several_values_are_lists() -> None:
    [setting] = parse(["--adapter_id", "a", "b"], heads()).settings
    assert setting.value == ["a", "b"]
