"""Advice of errors, notes and pages is accepted when it is typed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lite_runner import app
from lite_runner.config import leaves
from lite_runner.config.argv import parse
from lite_runner.config.groups import GROUPS, options_of
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, schemas
from lite_runner.sweep import jobs_of
from lite_runner.system import memory
from tests import advice
from tests import frozen_keys as frozen
from tests.doc_pages import PAGES, prose
from tests.paths import ROOT

PACKAGE = ROOT / "lite_runner"
MODULES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
# Modules whose errors are those of some run modes alone: what they name is a key of each.
RUN_MODES = {
    "bench/": ["bench"],
    "chat/": ["chat"],
    "conversion/": ["convert"],
    "doctor/": ["doctor"],
    "output/completions.py": ["predict", "slora"],
    "output/completer.py": ["predict"],
    "output/scoring.py": ["eval"],
    "serving/": ["serve"],
    **{f"run_modes/{name}.py": [name] for name in options_of("run_mode")},
}
# What stands before an = and is no key: parameters of Python functions, fields of a request.
PYTHON = {
    *("path_initial_model_for_weight_conversion", "model_name", "add_special_tokens"),
    "vocab_emb_dp",
}
REQUEST = {"n", "stream", "type", "logprobs"}
# That is no key of every run's config; GE's options have any names.
TYPED = {
    *("key", "name", "plugins", "hydra.searchpath"),
    "infer.ge_options.ascend_context.rank_table_file",
}
# Flags of msrun, Ray, llama.cpp, pip.
OTHER_PROGRAMS = {"worker_num", "head", "address", "merge", "force-reinstall"}


def test_a_hint_names_what_is_there() -> None:
    wrong = []
    for path in MODULES:
        place = str(path.relative_to(ROOT))
        modes = next((found for part, found in RUN_MODES.items() if f"runner/{part}" in place), [])
        besides = PYTHON | TYPED
        if "lite_runner/api/" in place:
            besides |= parameters() | advice.last_names()
        if "lite_runner/serving/" in place:
            besides |= REQUEST
        for text in advice.hints(path):
            for phrase in re.split(r"; | or ", text):
                named = re.findall(r"run_mode=(\w+)", phrase) or modes
                for key, _ in advice.SETTING.findall(phrase):
                    possible = [advice.known(), *map(keys_of, named)]
                    if key not in besides and not all(key in one for one in possible):
                        wrong.append(f"{place}: {key}= in {text!r}")
            flags = set(advice.FLAG.findall(text)) - advice.flags() - OTHER_PROGRAMS
            wrong += [f"{place}: --{flag} in {text!r}" for flag in flags]
    assert not wrong, "\n".join(wrong)


def test_a_message_names_targets_and_files_that_are_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {missing}"
        for path in MODULES
        for text in advice.texts_of(path)
        for missing in advice.missing(text)
    ]
    assert not wrong, "\n".join(wrong)


# -- What is typed as a refusal says. -------------------------------------------------------------


@pytest.mark.parametrize("run_mode", frozen.run_modes())
def test_the_remedy_of_a_refusal_is_accepted(run_mode: str, tmp_path: Path) -> None:
    wrong, seen = set(), set()
    with frozen.beside(tmp_path):
        for sample, verdicts in frozen.stored("accepted.json").items():
            verdict = (frozen.key_of(sample), verdicts[run_mode])
            if verdict[1].startswith("refused") and verdict not in seen:
                seen.add(verdict)
                wrong |= {*refused_again(frozen.command_line(run_mode, sample))}
    assert not wrong, "\n".join(wrong)


LINES = {
    **{mode: " ".join(words) for mode, words in frozen.typed()["lines"].items()},
    "chat": "model=tiny_llama",
    "serve": "model=tiny_llama",
}
# Runs that are refused though their config is valid.
REFUSED = [
    *(f"run_mode={mode} {line}" for mode, line in LINES.items()),
    *(f"run_mode={mode} {line} context.device_target=Ascend" for mode, line in LINES.items()),
    "run_mode=predict predict_data=hi chat=true",
    "run_mode=predict predict_data=hi infer.model_dir=missing backend=mslite",
    "run_mode=predict predict_data=hi infer.prefill_model_path=a backend=mslite",
    "run_mode=predict predict_data=hi quant=a16w4 quant_group=128",
    "run_mode=shard parallel=tp2 load_checkpoint=adapters.json",
]


def test_the_remedy_of_a_plan_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With too little memory for a model of 7 billion parameters, on a processor."""
    wrong = set()
    with frozen.beside(tmp_path):
        for line in REFUSED:
            words = [*line.replace("tiny_llama", "llama2_7b").split(), "dry_run=true"]
            for free in (8 << 30, 16 << 30, 32 << 30):
                monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
                app.main(words)
                captured = capsys.readouterr()
                for one in f"{captured.out}{captured.err}".splitlines():
                    wrong |= {*not_accepted(words, one)}
    assert not wrong, "\n".join(wrong)


# -- Pages. ---------------------------------------------------------------------------------------

CODE = re.compile(r"`([^`\n]+)`")


def test_a_page_names_what_is_there(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=page.stem):
            possible = advice.known() | PYTHON | REQUEST | TYPED
            wrong = []
            for text in CODE.findall(prose(page)):
                wrong += [f"`{text}`: {one}" for one in advice.missing(text)]
                settings = [] if "(" in text else advice.SETTING.findall(text)  # Python
                wrong += [f"`{text}`" for key, _ in settings if key not in possible]
            assert not wrong, "\n".join(wrong)


# -- How it is tried. -----------------------------------------------------------------------------

ADVICE = re.compile(r"; |expected |needs |add |only with |-> | or |to fit ")
PLACEHOLDER = re.compile(r"[A-Z]{2}.*|[NX]|.*\.\.\.|")


def refused_again(words: list[str]) -> Iterator[str]:
    """Hints of a command line that, once followed, are refused."""
    try:
        jobs_of(parse(words, heads()))
    except ConfigError as error:
        for line in lines_of(error):
            yield from not_accepted(words, line)


def not_accepted(words: list[str], text: str) -> Iterator[str]:
    """The settings of a line that a run printed which that run does not take."""
    mode = next(word for word in reversed(words) if word.startswith("run_mode="))
    start = ADVICE.search(text)
    if start is None or "run_mode=" in text[start.start() :]:
        return
    for phrase in re.split(r"[;,]| or ", text[start.start() :]):
        found = [one for one in advice.SETTING.findall(phrase) if "=".join(one) not in words]
        for key, _ in found:
            if key not in keys_of(mode.partition("=")[2]):
                yield f"{words}: {text}: {mode} has no {key}"
        settings = [f"{key}={value}" for key, value in found if not PLACEHOLDER.fullmatch(value)]
        if not settings:
            continue
        try:
            jobs_of(parse([*words, *settings], heads()))
        except ConfigError as error:
            for line in lines_of(error):
                if any(re.match(rf"{re.escape(key)}[=: ]", line) for key, _ in found):
                    yield f"{words}: {text}: with {settings} {line}"


def lines_of(error: ConfigError) -> list[str]:
    first, *others = error.message.splitlines()
    return [line.removeprefix("  - ") for line in others] or [first]


@cache
def keys_of(run_mode: str) -> set[str]:
    """Every dotted key of a run mode, its sections and the groups."""
    mode = "finetune" if run_mode == "train" else run_mode  # which MindFormers' is
    found = {*leaves(schemas().of(mode)), *GROUPS, "run_mode"}
    return found | {key[:i] for key in found for i, letter in enumerate(key) if letter == "."}


def parameters() -> set[str]:
    """Every parameter and field of the Python API, and what transformers' tokenizers take."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (PACKAGE / "api").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {node.arg for node in nodes if isinstance(node, ast.arg)}
    named |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    return named | {"padding", "truncation", "return_dict_in_generate"}
