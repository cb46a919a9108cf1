"""The keys of an evaluation: validation errors, windows by default, reading the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.config import prompts
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.evaluation.options import EvalOptions, read_text

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
EVAL = ("run_mode=eval", "model=tiny_llama")
TEXT = f"eval_data={__file__}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["eval_data="], "eval_data is empty; give a text file"),
        (["eval_data=nowhere.txt"], "eval_data: no file nowhere.txt"),
        (["eval_data=/"], "eval_data: no file /"),
        ([f"eval_data={'x' * 5000}"], "eval_data: no file xxx"),
        (["eval_window=1"], "eval_window: got 1, expected an integer >= 2 or null"),
        (["eval_window=257"], "eval_window: got 257, expected at most the model's context of 256"),
        (["eval_stride=0"], "eval_stride: got 0, expected an integer >= 1 or null"),
        (["eval_stride=257"], "eval_stride: got 257, expected at most the window of 256 tokens"),
        (["eval_window=8", "eval_stride=9"], "expected at most the window of 8 tokens"),
        (["backend=mslite"], "backend=mslite is not available with run_mode=eval"),
        (
            ["infer.model_dir=x", "backend=ms"],
            "infer.model_dir has an effect only with run_mode=export",
        ),
        (["engine=lite", "backend=ms"], "engine has an effect only with run_mode=export"),
        (["parallel=tp2"], "use_parallel=true has no effect with run_mode=eval"),
        (["predict_data=x"], "predict_data has no effect with run_mode=eval"),
        (["max_new_tokens=9"], "max_new_tokens has no effect with run_mode=eval"),
        (["chat=true"], "chat has no effect with run_mode=eval"),
        (["truncate=left"], "truncate has no effect with run_mode=eval"),
        (["predict_batch_size=2"], "predict_batch_size has no effect with run_mode=eval"),
    ],
)
def test_validation_errors(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*EVAL, TEXT, *settings)


def test_other_run_modes_have_no_window(faults: Faults) -> None:
    text = faults("model=tiny_llama", "predict_data=x", TEXT, "eval_window=8")
    assert "eval_data has no effect with run_mode=predict" in text
    assert "eval_window has no effect with run_mode=predict" in text


def test_windows_by_default(resolve: Resolve) -> None:
    def sizes(*settings: str) -> tuple[int, int]:
        config = resolve(*EVAL, TEXT, *settings)
        model = config.model_config()
        assert isinstance(config, EvalOptions) and model is not None
        return config.window_of(model)

    assert sizes() == (256, 256)
    assert sizes("model.model_config.seq_length=4096") == (512, 512)
    assert sizes("eval_window=32") == (32, 32)
    assert sizes("eval_stride=64") == (256, 64)


def test_the_config_of_a_run_can_be_run_again(resolve: Resolve) -> None:
    config = resolve(
        *EVAL,
        TEXT,
        "eval_stride=64",
        "src_strategy_path_or_dir=/s",
        "auto_trans_ckpt=true",
        "load_checkpoint=/c",
    )
    assert run_modes.from_dict(config.to_dict()) == config


def test_reading(resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.md"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    config = resolve(*EVAL, f"eval_data={path}")
    assert isinstance(config, EvalOptions)
    assert read_text(config) == "one\r\ntwo\n"
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_text(config)
    path.write_bytes(b"x" * 9)
    monkeypatch.setattr("lite_runner.evaluation.options.MAX_PROMPT_BYTES", 8)
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 8)
    with pytest.raises(ConfigError, match="has more than 8 bytes"):
        read_text(config)
