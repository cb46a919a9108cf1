"""Structured output of predict: completions of a grammar, whatever the model."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lite_runner import AutoModel, AutoTokenizer, pipeline
from lite_runner.app import main
from lite_runner.errors import ConfigError
from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
CODE = r"[A-Z]{2}-\d{3}"
# Each key, in a text and where it may be as data; all of them allow the same.
CODES = {
    "guided_json": {"type": "string", "pattern": f"^{CODE}$"},
    "guided_regex": f'"{CODE}"',
    "guided_choice": ['"AB-123"', '"CD-456"'],
    "response_format": {
        **FORMAT,
        "json_schema": {"name": "x", "schema": {"type": "string", "pattern": f"^{CODE}$"}},
    },
    "structured_outputs": {"regex": f'"{CODE}"'},
}


def is_pet(text: str) -> bool:
    """True if a text is JSON of SCHEMA."""
    found = json.loads(text)
    assert list(found) == ["name", "age", "kind"]
    assert isinstance(found["name"], str) and len(found["name"]) <= 8
    assert type(found["age"]) is int and 0 <= found["age"] <= 130
    assert found["kind"] in ("cat", None)
    return True


@pytest.fixture
def run(run: Run) -> Run:
    return functools.partial(run, "verbosity=0")


def test_samples_are_of_the_schema(run: Run) -> None:
    words = ["model=tiny_llama", "predict_data=['a','bc']", "max_new_tokens=200", "temperature=2"]
    given = f"response_format={json.dumps(FORMAT)}"
    result = run(*words, given, "num_return_sequences=4", "logprobs=0", "seed=1")
    rows = result["results"]
    assert len({row["text"] for row in rows}) > 1 and all(is_pet(row["text"]) for row in rows)
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert all(row["logprobs"][0]["logprob"] < 0 for row in rows)
    again = run("--config", "outputs/latest/config.yaml")
    assert [row["text"] for row in again["results"]] == [row["text"] for row in rows]


@pytest.mark.parametrize("key", CODES)
def test_every_key_in_every_place(run: Run, key: str) -> None:
    words, value = ["model=tiny_llama", "temperature=3", "max_new_tokens=40"], CODES[key]
    text = value if isinstance(value, str) else json.dumps(value)
    Path("mine.yaml").write_text(json.dumps({key: value}), encoding="utf-8")
    record = {"prompt": "hi", key: value}
    Path("record.jsonl").write_text(json.dumps(record), encoding="utf-8")
    cell = text.replace('"', '""')
    Path("row.csv").write_text(f'prompt,{key}\nhi,"{cell}"\n', encoding="utf-8")
    for place in (
        [f"{key}={text}", "predict_data=hi"],
        ["--config", "mine.yaml", "predict_data=hi"],
        [f"predict_data=[{json.dumps(record)}]"],
        ["predict_data=record.jsonl"],
        ["predict_data=row.csv"],
    ):
        (row,) = run(*words, *place)["results"]
        assert re.fullmatch(f'"{CODE}"', row["text"], re.ASCII), place


def test_a_prompts_own_grammar_replaces_the_runs(run: Run) -> None:
    """In one batch each text is that of its prompt alone."""
    requests: list[Mapping[str, Any]] = [
        {"prompt": "one", "guided_regex": "[0-9]{6}", "seed": 1},
        {"prompt": "one", "seed": 1},
        {"prompt": "two", "guided_json": SCHEMA, "seed": 2},
        {"prompt": "three", "response_format": {"type": "text"}, "seed": 3},
    ]
    words = ["model=tiny_llama", "temperature=2", "max_new_tokens=90", "guided_choice=[yes,no]"]
    together = run(*words, f"predict_data={json.dumps(requests)}")["results"]
    texts = [row["text"] for row in together]
    assert re.fullmatch("[0-9]{6}", texts[0]) and texts[1] in ("yes", "no") and is_pet(texts[2])
    assert together[3]["finish_reason"] == "length" and len(texts[3]) > 40
    for request, row in zip(requests, together, strict=True):
        (alone,) = run(*words, f"predict_data=[{json.dumps(request)}]")["results"]
        assert alone["token_ids"] == row["token_ids"], request


REFUSED = {
    'guided_json={"uniqueItems":true}': "guided_json: .*uniqueItems",
    "guided_json=[1]": "guided_json: got .*, expected a section",
    "guided_json={": "guided_json: not JSON",
    "guided_regex=(a": "guided_regex: .*unclosed group",
    "guided_regex=(a{999}){999}": "guided_regex: .* repeats 998,001 times",
    "guided_choice=[]": "guided_choice: expected one or more texts",
    "guided_choice=[a,'']": "guided_choice: expected one or more texts",
    'response_format={"type":"xml"}': "response_format.type: got 'xml', expected one of text, json",
    "response_format.type=json_schema": "response_format.json_schema: expected with type=json_sch",
    'structured_outputs={"grammar":"x"}': "structured_outputs.grammar: no such key",
    'structured_outputs={"choice":[]}': "structured_outputs.choice: expected one or more texts",
    "guided_regex=a guided_choice=[a]": "guided_choice: cannot be combined with guided_regex",
    "guided_regex=a num_beams=2": "num_beams=2 cannot be combined with guided_regex",
    "guided_regex=a min_new_tokens=2": "min_new_tokens=2 cannot be combined with guided_regex",
    "guided_regex=a backend=mindformers": "guided_regex: backend=mindformers has no grammars",
    "guided_regex=a model.model_config.is_sample_acceleration=true backend=mslite": "argmax alone",
    'predict_data=[{"prompt":"x","guided_regex":"("}]': r"prompt 0: guided_regex: .*unclosed",
    'predict_data=[{"prompt":"x","guided_regex":"a"}] num_beams=2': r"predict_data\[0\]: num_beams",
    'predict_data=[{"prompt":"x","min_new_tokens":2}] guided_regex=a': r"_data\[0\]: min_new_token",
}


def test_errors_come_before_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that is not there, by the name of its key."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    for words, message in REFUSED.items():
        refused(["model=smollm2_135m", "predict_data=x", *words.split(" ")], 2)
        assert re.search(message, capsys.readouterr().err), words
    assert not (tmp_path / "cache/pypi").exists()


def test_without_the_package_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    from lite_runner.system import environment

    missing = environment.Requirement("llguidance", ">=1.5")
    monkeypatch.setattr(environment, "remembered", lambda key, state, make: make())
    monkeypatch.setattr(environment, "unmet", lambda extra="": {missing: None} if extra else {})
    assert main(["model=tiny_llama", "predict_data=x", "guided_regex=a"]) == 3
    stderr = capsys.readouterr().err
    assert "llguidance is not installed" in stderr
    assert f'{sys.executable} -m pip install "llguidance>=1.5"' in stderr
    run("model=tiny_llama", "predict_data=x", "max_new_tokens=2")  # needs none


@pytest.mark.xdist_group("smollm2")
def test_the_real_model_answers_in_the_format(run: Run, smollm2_gguf: Path) -> None:
    words = ["model=smollm2_135m", f"load_checkpoint={smollm2_gguf}", "max_new_tokens=120"]
    asked = [
        {"prompt": "A pet as JSON:", "response_format": FORMAT},
        {"prompt": "The capital of France is", "guided_regex": " (London|Paris|Rome)"},
    ]
    first, second = run(*words, f"predict_data={json.dumps(asked)}")["results"]
    assert is_pet(first["text"]) and first["finish_reason"] == "stop"
    assert second["text"] == " Paris"


def test_in_python_too() -> None:
    model, tokenizer = (
        AutoModel.from_pretrained("tiny_llama"),
        AutoTokenizer.from_pretrained("tiny_llama"),
    )
    ids, options = tokenizer("hi")["input_ids"], {"temperature": 2.0, "max_new_tokens": 200}
    for row in model.generate(ids, response_format=FORMAT, num_return_sequences=3, **options):
        assert is_pet(tokenizer.decode(row[len(ids) :], skip_special_tokens=True))
    pipe = pipeline("text_generation", model=model, tokenizer=tokenizer, guided_choice=["a", "bc"])
    (answer,) = pipe("hi", max_new_tokens=9)
    assert answer["text_generation_text"][0] in ("hia", "hibc")
    (answer,) = pipe("hi", max_new_tokens=9, guided_choice=None)
    assert answer["text_generation_text"][0] in ("hia", "hibc")
    free = model.generate(ids, max_new_tokens=9, eos_token_id=[])[0]  # later calls are free again
    assert len(free) == len(ids) + 9
    with pytest.raises(ConfigError, match=r"guided_regex: .*unclosed group"):
        model.generate(ids, guided_regex="(", max_new_tokens=9)
    with pytest.raises(ConfigError, match="num_beams=2 cannot be combined with guided_regex"):
        model.generate(ids, guided_regex="a", num_beams=2)
