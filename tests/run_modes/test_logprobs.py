"""Log-probabilities of a run: in result.json, as JSON lines, and against eval and transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
TINY = ["verbosity=0", "model=tiny_llama", "eos_token_id=[]"]
REFERENCE = json.loads(
    (Path(__file__).parents[1] / "fixtures/reference/smollm2_135m.json").read_text("utf-8")
)


def test_logprobs_are_in_the_results(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "predict_data=['ab','c']", "max_new_tokens=4", "output_format=jsonl"]
    plain = run(*options)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = {"logprobs", "prompt_logprobs"}
    assert all(names.isdisjoint(row) for row in [*plain["results"], *lines])
    assert [row["cached_tokens"] for row in plain["results"]] == [0, 0]
    found = run(*options, "logprobs=3", "prompt_logprobs=0")["results"]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row, line, before, prompt in zip(found, lines, plain["results"], ["ab", "c"], strict=True):
        assert row["token_ids"] == before["token_ids"]
        assert [one["token"] for one in row["logprobs"]] == row["token_ids"]
        for one in row["logprobs"]:
            ids, values = zip(*one["top"], strict=True)
            assert len(ids) == 3 and [*values] == sorted(values, reverse=True)
            assert (ids[0], values[0]) == (one["token"], one["logprob"])  # greedy
            assert values[0] <= 0
        first, *others = row["prompt_logprobs"]
        assert first is None
        assert [(one["token"], one["top"]) for one in others] == [
            (b, []) for b in prompt.encode()[1:]
        ]
        assert {name: line[name] for name in names} == {name: row[name] for name in names}


def test_the_token_that_ends_a_text_has_one_too(run: Run) -> None:
    options = ["verbosity=0", "model=tiny_llama", "predict_data=x", "max_new_tokens=6"]
    ids = run(*options, "eos_token_id=[]")["results"][0]["token_ids"]
    (row,) = run(*options, f"eos_token_id={ids[3]}", "logprobs=0")["results"]
    end = ids.index(ids[3])
    assert row["finish_reason"] == "stop" and row["token_ids"] == ids[:end]
    assert [one["token"] for one in row["logprobs"]] == ids[: end + 1]


def test_prompt_logprobs_give_the_perplexity_of_eval(run: Run) -> None:
    text = "A text, neither long nor short: 文字。"
    Path("text.txt").write_text(text, encoding="utf-8")
    one = "model.model_config.num_layers=1"  # to compile
    wanted = run("verbosity=0", "run_mode=eval", "model=tiny_llama", one, "eval_data=text.txt")
    given = f"predict_data=[{json.dumps(text, ensure_ascii=False)}]"
    for options in ([], ["model.model_config.use_past=false"], ["backend=ms"]):
        (row,) = run(*TINY, one, given, "max_new_tokens=1", "prompt_logprobs=0", *options)[
            "results"
        ]
        found = [one["logprob"] for one in row["prompt_logprobs"][1:]]
        assert len(found) == wanted["evaluation"]["scored_tokens"]
        perplexity = math.exp(-math.fsum(found) / len(found))
        tolerance = 1e-9 if not options else 1e-5  # MindSpore's operators round otherwise
        assert perplexity == pytest.approx(wanted["evaluation"]["perplexity"], rel=tolerance)


@pytest.mark.usefixtures("float32_cache")
@pytest.mark.xdist_group("smollm2")
def test_logprobs_of_the_real_model_match_transformers(run: Run, smollm2_gguf: Path) -> None:
    cases = REFERENCE["completions"]
    rows = [{"prompt": case["prompt"], "logprobs": 5} for case in cases]
    text = REFERENCE["perplexity"]["text"]
    rows.append({"prompt": text, "prompt_logprobs": 0})
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["model=smollm2_135m", "quant=none", f"load_checkpoint={smollm2_gguf}"]
    *found, scored = run("verbosity=0", "max_new_tokens=1", *options, "predict_data=p.jsonl")[
        "results"
    ]
    for row, case in zip(found, cases, strict=True):
        top = row["logprobs"][0]["top"]
        assert [id for id, _ in top] == case["first_top5_ids"]
        # Logits and log-probabilities differ by a number that is the same for all tokens.
        apart = [value - top[0][1] for _, value in top]
        wanted = [value - case["first_top5_logits"][0] for value in case["first_top5_logits"]]
        assert apart == pytest.approx(wanted, abs=1e-4 * abs(case["first_top5_logits"][0]))
    tokens = [one["token"] for one in scored["prompt_logprobs"][1:]]
    assert tokens == REFERENCE["perplexity"]["token_ids"][1:]
    mean = -math.fsum(one["logprob"] for one in scored["prompt_logprobs"][1:]) / len(tokens)
    assert mean == pytest.approx(REFERENCE["perplexity"]["mean_nll"], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["logprobs=2", "num_beams=2"], "logprobs=2 is not available with num_beams=2"),
        (["logprobs=101"], "logprobs: got 101, expected an integer >= 0 and <= 100"),
        (["prompt_logprobs=101"], "prompt_logprobs: got 101, expected"),
        (
            ["prompt_logprobs=0", "backend=mslite"],
            "prompt_logprobs=0 is not available with backend=mslite",
        ),
        (
            ["logprobs=0", "run_mode=eval", "eval_data=x.txt"],
            "logprobs has no effect with run_mode",
        ),
    ],
)
def test_unavailable_logprobs_are_refused_before_reading(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused(["model=smollm2_135m", "predict_data=x", *options], 2)
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
