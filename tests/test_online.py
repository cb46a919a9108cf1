"""Which operators compute a run, and what the run says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lite_runner import kernels, session
from lite_runner.app import main
from lite_runner.config.plan import memory_need
from lite_runner.launcher import job
from lite_runner.weights.checkpoint import model_config_of

HERE = Path(__file__).parent
SHORT = ["model=tiny_llama", "predict_data=['some words','more']", "max_new_tokens=6"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def result() -> dict:
    return json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))


def tokens() -> list[list[int]]:
    return [row["token_ids"] for row in result()["results"]]


def test_our_own_operators_and_mindspores_choose_the_same_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(SHORT) == 0
    assert result()["engine"] == f"mindspore, {kernels.instructions()} kernels"
    assert "MindSpore's operators compute" not in capsys.readouterr().err
    own = tokens()
    assert main([*SHORT, "context.kernels=false"]) == 0
    assert result()["engine"] == "mindspore"
    assert tokens() == own


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("model.model_config.use_past=false", "use_past=false"),
        ("model.model_config.compute_dtype=float16", "compute_dtype=float16"),
    ],
)
def test_a_run_says_why_they_do_not_serve(
    capsys: pytest.CaptureFixture[str], setting: str, why: str
) -> None:
    assert main([*SHORT, setting]) == 0
    told = capsys.readouterr().err
    assert told.count(f"MindSpore's operators compute, not this project's: {why}") == 1
    assert result()["engine"] == "mindspore"


def test_without_a_compiler_mindspores_serve_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", Path("nowhere/operators.so"))
    assert main([*SHORT, "quant=a16w8"]) == 0
    told = capsys.readouterr().err
    assert told.count("they were not built: the set-up found no C++ compiler") == 1
    assert told.count("compute with the floats that the integers stand for") == 1


@pytest.mark.parametrize("cache", ["fp16", "int8"])
def test_a_rounded_cache_needs_them(capsys: pytest.CaptureFixture[str], cache: str) -> None:
    assert main([*SHORT, f"kv_cache={cache}"]) == 0
    assert main([*SHORT, f"kv_cache={cache}", "context.kernels=false"]) == 2
    told = capsys.readouterr().err
    assert f"kv_cache={cache} needs this project's own operators" in told
    assert "context.kernels=false" in told


def test_a_rounded_cache_is_refused_before_memory_is_asked_for_and_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "free_memory", lambda: 0)
    assert main([*SHORT, "kv_cache=int8"]) == 3
    assert "0 B is free" in capsys.readouterr().err
    assert main([*SHORT, "kv_cache=int8", "context.kernels=false"]) == 2
    told = capsys.readouterr().err
    assert "kv_cache=int8 needs this project's own operators" in told
    assert "make random weights" not in told


def test_a_rounded_cache_is_refused_before_any_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    assert main([*SHORT, "kv_cache=int8", "parallel=tp2"]) == 2
    assert "which do not serve here: several ranks share the model" in capsys.readouterr().err


def test_a_rounded_cache_takes_less_memory() -> None:
    model = model_config_of(HERE / "fixtures" / "reference" / "llama")
    assert model is not None
    needs = [
        memory_need(model, "float32", 2, 100, kv_cache=cache).cache
        for cache in ("fp32", "fp16", "int8")
    ]
    scales = 2 * model.num_layers * model.n_kv_heads * 2 * 100 * 4
    assert needs[1] * 2 == needs[0] and (needs[2] - scales) * 4 == needs[0]
