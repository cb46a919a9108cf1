"""Task files: the built-in ones, lm_eval's, and unsupported keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.errors import ConfigError
from lite_runner.evaluation.tasks import built_in, read_task
from tests.paths import ROOT

LM_EVAL = ROOT / "tests/fixtures/lm_eval"
NAMES = (
    "adgen arc_challenge arc_easy boolq ceval cmmlu gsm8k hellaswag humaneval lambada mmlu squad"
    " texts"
).split()


def test_built_in_tasks_are_read() -> None:
    assert built_in() == NAMES
    tasks = [read_task(name) for name in NAMES]
    assert [task.task for task in tasks] == NAMES
    counts = {task.task: len(task.subsets or ()) for task in tasks if task.subsets}
    assert counts == {"mmlu": 57, "ceval": 52, "cmmlu": 67}


def test_a_task_of_five_lines(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        'doc_to_text: "Q: {{question}}\\nA:"\n'
        'doc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
        "metric_list: [{metric: exact_match, ignore_case: true}, {metric: f1}]\n"
    )
    task = read_task(str(tmp_path / "own.yaml"))
    assert (task.task, task.until, task.split) == ("own", ("\n",), "test")
    assert [one.metric for one in task.metrics] == ["exact_match", "f1"]


def test_a_task_of_lm_eval_that_includes_another(tmp_path: Path) -> None:
    (tmp_path / "_default_yaml").write_text((LM_EVAL / "tiny_words.yaml").read_text())
    (tmp_path / "more.yaml").write_text("include: _default_yaml\ntask: more\ntag: x\n")
    task = read_task(str(tmp_path / "more.yaml"))
    assert (task.task, task.output_type, task.until) == ("more", "generate_until", ("\n\n",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("process_docs: !function utils.f", "process_docs: runs code, which is not supported"),
        ("doc_to_text: !function utils.f", "doc_to_text: runs code (!function utils.f)"),
        ("metric_list: [{metric: !function utils.f}]", "metric_list.0.metric: runs code"),
        ("use_prompt: x", "use_prompt: takes promptsource, which is not supported"),
        ("group: x", "group: is a group: name its tasks in eval.tasks"),
        ("metric_list: [{metric: bleu}]", "metric_list[0].metric: got 'bleu', expected one of"),
        ("metric_list: [{metric: acc}]", "metric_list: got acc, expected one of exact_match, f1"),
        ("output_type: loglikelihood_rolling", "output_type: got 'loglikelihood_rolling'"),
        ("output_type: multiple_choice", "doc_to_choice: missing"),
        ("repeats: 8", "repeats: got 8, expected 1"),
        ("generation_kwargs: {do_sample: true}", "generation_kwargs.do_sample: got true"),
        ("fewshot_splt: train", "fewshot_splt: no such key; did you mean fewshot_split?"),
        ("include: missing.yaml", "include: missing.yaml: No such file"),
        ("filter_list: [{name: a, filter: [{function: majority_vote}]}]", "got 'majority_vote'"),
    ],
)
def test_unsupported_keys_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    first = "" if text.startswith("doc_to_text") else 'doc_to_text: "{{a}}"\n'
    (tmp_path / "own.yaml").write_text(f"{first}doc_to_target: b\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        read_task(str(tmp_path / "own.yaml"))
    assert expected in raised.value.message


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match="no task gsm9k; did you mean gsm8k"):
        read_task("gsm9k")
