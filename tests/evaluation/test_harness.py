"""Runs over tasks: figures of lm_eval's own backend, files, resuming, comparing, faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.evaluation import harness
from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf

LM_EVAL = ROOT / "tests/fixtures/lm_eval"
DATA = ROOT / "tests/fixtures/evaluation/data"
Faults = Callable[..., str]
TINY = ["run_mode=eval", "model=tiny_llama", "load_checkpoint=random", "verbosity=0"]
# As hf.json was made: float32, no bos.
AS_HF = ["run_mode=eval", "model=tiny.gguf", "kv_cache=fp32", "verbosity=0"]
AS_HF += ["processor.tokenizer.add_bos_token=false"]


def lines(folder: str = "outputs/latest") -> list[dict[str, Any]]:
    text = (Path(folder) / harness.SAMPLES).read_text("utf-8")
    rows = list(map(json.loads, text.splitlines()))
    return sorted(rows, key=lambda row: (row["task"], row["index"]))


def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    return found["tasks"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    for file in LM_EVAL.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def test_scores_match_lm_eval_and_a_run_is_gone_on_with(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hf.json: lm_eval's `--model hf` of the same weights."""
    words = [*AS_HF, "eval.tasks=[tiny_choice.yaml,tiny_words.yaml]"]
    assert main(words) == 0
    expected = json.loads((LM_EVAL / "hf.json").read_text("utf-8"))
    rows = lines()
    choices, texts = rows[:40], rows[40:]
    for row, values in zip(choices, expected["tiny_choice"], strict=True):
        assert [one for one, _ in row["likelihoods"]] == pytest.approx(values, rel=1e-5)
        assert row["correct"] == (row["answers"]["none"] == row["choices"][row["target"]])
    assert [row["response"] for row in texts] == expected["tiny_words"]
    found = result()
    for task in found["results"]:
        scores = {one["metric"]: one["value"] for one in task["metrics"]}
        assert scores == pytest.approx(expected["scores"][task["task"]])
    assert "tiny_choice  40       0      acc          0.3000  0.0734" in capsys.readouterr().out

    # Killed after 50 samples, in the middle of a line.
    done = Path("outputs/latest").resolve()
    whole = (done / harness.SAMPLES).read_text("utf-8").splitlines(keepends=True)
    (done / harness.SAMPLES).write_text("".join(whole[:50]) + whole[50][:30], "utf-8")
    assert main([*words, "eval.resume=outputs/latest"]) == 0
    again = result()
    assert (again["resumed"], again["results"]) == (50, found["results"])
    assert lines() == rows
    assert main([*words, "eval.resume=outputs/latest", "kv_cache=int8"]) == 2
    assert "was computed with other values of kv_cache" in capsys.readouterr().err


def test_comparing_two_runs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*AS_HF, "eval.tasks=tiny_choice.yaml", "eval.limit=12"]
    assert main(words) == 0
    first = lines()
    assert main([*words, "eval.compare=outputs/latest", "quant=a16w4"]) == 0
    (acc, norm) = result()["differences"]
    better = sum(
        a["scores"]["acc"] > b["scores"]["acc"] for a, b in zip(lines(), first, strict=True)
    )
    assert (acc["task"], acc["metric"], acc["samples"]) == ("tiny_choice", "acc", 12)
    assert acc["better"] == better and 0 < acc["p"] <= 1 and norm["metric"] == "acc_norm"
    assert "better  worse  p" in capsys.readouterr().out
    Path("texts.csv").write_text("text\nA text.\nAnother one.\n", "utf-8")
    texts = [*AS_HF, "eval.tasks=[texts]", "eval.data=texts.csv"]
    assert main(texts) == main([*texts, "eval.compare=outputs/latest"]) == 0
    assert result()["differences"] == []


def test_built_in_tasks_on_their_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every kind, with examples; humaneval's completions are written, and no code is run."""
    tasks = "eval.tasks=[mmlu,boolq,lambada,humaneval]"
    words = [*TINY, f"eval.data={DATA}", "eval.fewshot=1", "model.model_config.seq_length=2048"]
    assert main([*words, tasks]) == 0
    found = {one["task"]: one for one in result()["results"]}
    assert {name: (one["samples"], one["shots"]) for name, one in found.items()} == {
        "mmlu": (4, 1),
        "boolq": (4, 1),
        "lambada": (5, 1),
        "humaneval": (2, 0),
    }
    assert [*found["mmlu"]["parts"]] == ["mmlu_anatomy"]
    assert {one["metric"] for one in found["lambada"]["metrics"]} == {"perplexity", "acc"}
    assert found["humaneval"]["metrics"] == []
    text = Path("outputs/latest/humaneval_completions.jsonl").read_text("utf-8")
    assert [json.loads(line)["task_id"] for line in text.splitlines()] == [
        "HumanEval/0",
        "HumanEval/1",
    ]
    assert "to be scored by evaluate_functional_correctness" in capsys.readouterr().out
    # Each example stands once in the cache: of its shared tokens few are computed again.
    assert result()["cached_tokens"] > 0


def test_an_interrupted_run_writes_what_there_is(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = harness.TaskRun._write

    def interrupt(self: harness.TaskRun, file: Any, line: Any) -> None:
        write(self, file, line)
        if len(self.scores) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(harness.TaskRun, "_write", interrupt)
    assert main([*AS_HF, "eval.tasks=tiny_choice.yaml"]) == 130
    found = result()
    assert found["interrupted"] and found["results"][0]["samples"] == len(lines()) == 5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["eval.tasks=mmlu", "eval_window=8"], "eval_window cannot be combined with eval.tasks"),
        (["eval.tasks=mmlu", "compare_backend=ms"], "two runs are compared by eval.compare=RUN"),
        (["eval.tasks=mmlu", "backend=mindformers"], "backend=mindformers scores texts alone"),
        (["eval.tasks=mmlu", "eval.data=none"], "eval.data: no folder none"),
        (["eval.tasks=mmlu", "eval.resume=none"], "eval.resume: no run with samples.jsonl in none"),
        (["eval_data=x", "eval.fewshot=2"], "eval.fewshot has no effect without eval.tasks"),
        ([], "eval_data is empty; give a text file"),
    ],
)
def test_validation_errors(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults("run_mode=eval", "model=tiny_bloom", *settings)


def test_planning_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, expected in (
        (["eval.tasks=none"], "eval.tasks: no task none"),
        (["eval.tasks=mmlu"], "mmlu: eval.data is empty; expected a folder"),
        (["eval.tasks=gsm8k", f"eval.data={DATA}"], "max_gen_toks: got 256, expected fewer"),
        (["eval.tasks=boolq", f"eval.data={DATA}", "eval.fewshot=99"], "99 examples: its split"),
    ):
        assert main([*TINY, *settings]) == 2
        assert expected in capsys.readouterr().err
