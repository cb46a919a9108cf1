"""Prompts: against lm_eval's of the same documents (fixtures/evaluation/make_fixtures.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lite_runner.errors import ConfigError, RunnerError
from lite_runner.evaluation.prompts import Sample, TaskOptions, samples_of
from lite_runner.evaluation.tasks import built_in, read_task
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from tests.paths import ROOT

FIXTURES = ROOT / "tests/fixtures/evaluation"
EXPECTED: dict[str, dict[str, list[list[Any]]]] = json.loads(
    (FIXTURES / "lm_eval.json").read_text("utf-8")
)


def samples(
    task: str, tokenizer: Tokenizer | None = None, data: Path | None = None, **changes: Any
) -> list[Sample]:
    given = {"shots": None, "limit": None, "chat": False, "system": "", "context": 1 << 20}
    options = TaskOptions(data=data or FIXTURES / "data", start=256, **given | changes)
    tokenizer = tokenizer or byte_tokenizer().with_special(add_bos=False)
    return list(samples_of(read_task(task), tokenizer, options, only=False))


@pytest.mark.parametrize("shots", [0, 2])
def test_prompts_match_lm_eval(shots: int) -> None:
    others = {"humaneval", "adgen", "squad", "texts"}  # the last three are MindFormers'
    assert EXPECTED.keys() == {*built_in()} - others
    decode = byte_tokenizer().decode
    for name, known in EXPECTED.items():
        found: list[tuple[str, str]] = []
        for one in samples(name, shots=shots):
            found += [
                (decode(each.ids[: each.start].tolist()), decode(each.ids[each.start :].tolist()))
                for each in one.continuations
            ]
            if one.prompt is not None:
                found.append((decode(one.prompt.tolist()), ""))
        assert len(found) == len(known[str(shots)]), name
        for (before, after), (context, ending) in zip(found, known[str(shots)], strict=True):
            assert before == context.rstrip() or name == "gsm8k", name
            assert before + after == context + (ending if name != "gsm8k" else ""), name


def test_targets() -> None:
    assert [one.target for one in samples("mmlu")] == [0, 1, 2, 3]
    assert [one.target for one in samples("cmmlu")] == [0, 1, 2, 3]
    assert [one.target for one in samples("arc_easy")] == [1, 2, 3]
    assert [one.target for one in samples("boolq")] == [0, 1, 0, 1]
    assert samples("lambada")[0].target == " red"
    assert samples("gsm8k")[0].target.endswith("#### 2")
    assert samples("mmlu")[0].name == "mmlu_anatomy"


def test_published_forms_that_differ(tmp_path: Path) -> None:
    """MMLU's CSV files without a heading, the first JSON lines of ARC and of BoolQ."""
    (tmp_path / "mmlu/test").mkdir(parents=True)
    (tmp_path / "mmlu/test/anatomy_test.csv").write_text('" What is 0 and 1?",1,2,3,4,A\n')
    stem = {"stem": "Which?", "choices": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]}
    line = json.dumps({"question": stem, "answerKey": "2"})
    (tmp_path / "ARC-Easy").mkdir()
    (tmp_path / "ARC-Easy/ARC-Easy-Test.jsonl").write_text(f"{line}\n")
    line = json.dumps({"question": "is it", "passage": "It is.", "answer": True, "title": "x"})
    (tmp_path / "BoolQ").mkdir()
    (tmp_path / "BoolQ/dev.jsonl").write_text(f"{line}\n")
    (mmlu,) = samples("mmlu", data=tmp_path)
    assert (mmlu.question, mmlu.target) == (samples("mmlu")[0].question, 0)
    (arc,) = samples("arc_easy", data=tmp_path)
    assert (arc.question, arc.choices, arc.target) == ("Question: Which?\nAnswer:", ["a", "b"], 1)
    (boolq,) = samples("boolq", data=tmp_path)
    assert boolq.target == 1


def test_chats() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer = byte_tokenizer().with_special(add_bos=False, chat_template=template)
    first = samples("arc_easy", tokenizer, shots=1, chat=True, system="Be brief.")[0]
    one = first.continuations[0]
    text = tokenizer.decode(one.ids.tolist())
    assert text.startswith("[system]Be brief.[user]Question: Which of these is ")
    assert text.count("[assistant]") == 2 and text.endswith("[assistant]a red wall")
    assert tokenizer.decode(one.ids[one.start :].tolist()) == "a red wall"


def test_long_prompts_are_cut_on_their_left() -> None:
    (one, *_) = samples("lambada", context=9)
    assert one.cut and [len(each.ids) for each in one.continuations] == [10]
    with pytest.raises(ConfigError, match="4 tokens to score do not fit"):
        samples("lambada", context=3)


OWN = """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
output_type: multiple_choice
"""


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"question": "a", "choices": ["b"], "answer": 1}, "doc_to_target: got 1, expected one of"),
        ({"question": "a", "choices": "b", "answer": 0}, "doc_to_choice: got 'b', expected a list"),
        ({"question": "a", "answer": 0}, "'choices' is undefined"),
        ({"question": "a", "choices": ["", "b"], "answer": 0}, "'' has no tokens to score"),
        ({"question": "7", "choices": ["b"], "answer": 0}, "several inputs"),
    ],
)
def test_documents_that_do_not_fit_the_task(
    tmp_path: Path, document: dict[str, Any], expected: str
) -> None:
    (tmp_path / "own.yaml").write_text(OWN + 'target_delimiter: ""\n')
    (tmp_path / "own.jsonl").write_text(json.dumps(document) + "\n")
    with pytest.raises(RunnerError) as raised:
        samples(str(tmp_path / "own.yaml"))
    assert expected in raised.value.message


def test_files_that_a_task_names_by_split(tmp_path: Path) -> None:
    data = FIXTURES / "data/arc_easy"
    own = (ROOT / "lite_runner/evaluation/tasks/arc_easy.yaml").read_text("utf-8")
    files = f"{{train: {data}/train.jsonl, test: {data}/test.jsonl}}"
    (tmp_path / "own.yaml").write_text(f"{own}dataset_kwargs: {{data_files: {files}}}\n")
    found = samples(str(tmp_path / "own.yaml"), shots=2)
    expected = samples("arc_easy", shots=2)
    assert [one.key for one in found] == [one.key for one in expected]
