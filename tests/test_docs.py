"""README and docs: every link leads somewhere, and every command line is one that is accepted."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.compose import heads
from lite_runner.config.sweep import jobs_of
from lite_runner.errors import ConfigError
from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
REDIRECTION = re.compile(r"\s*(&>|2>|>).*$")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

# What the yaml of the examples holds of a MindFormers' one.
YAML = """
run_mode: predict
use_parallel: True
trainer: {type: CausalLanguageModelingTrainer, model_name: llama2_7b}
parallel_config: {data_parallel: 1, model_parallel: 2}
model:
  arch: {type: LlamaForCausalLM}
  model_config: {type: LlamaConfig, seq_length: 512, use_past: True}
"""

MINE = """# @package _global_
# Llama 2 with three layers.
defaults: [llama2_7b, _self_]
trainer: {model_name: mine}
model: {model_config: {num_layers: 3}}
"""


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown viewers make them."""
    headings = HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def commands(page: Path) -> Iterator[tuple[list[str], str]]:
    """The arguments of each run_lite.py command in the page's code blocks, and the error that is
    shown below it, if any."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        for line, below in itertools.zip_longest(lines, lines[1:], fillvalue=""):
            words = line.removeprefix("$ ")
            if re.match(r"(\S+ .*\| )?python run_lite\.py ", words):
                words = REDIRECTION.sub("", words.partition("run_lite.py ")[2])
                arguments = shlex.split(words, comments=True)
                if "..." not in arguments:
                    yield arguments, below.removeprefix("error: ") if below[:6] == "error:" else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of somebody who tries the commands: the files that they name, and a key."""
    (tmp_path / "prompts.txt").write_text("The capital of France is\n")
    (tmp_path / "questions.jsonl").write_text(
        '{"id": "q1", "prompt": "The capital of France is"}\n'
    )
    (tmp_path / "my.yaml").write_text("max_new_tokens: 64\n")
    for name in ("predict_llama2_7b.yaml", "dist.yaml"):
        (tmp_path / name).write_text(YAML)
    for name in ("Qwen2.5-0.5B-Instruct-Q8_0.gguf", "smollm2.ckpt"):
        (tmp_path / name).touch()
    (tmp_path / "path/to/hf-folder").mkdir(parents=True)
    options = tmp_path / "my_conf/model"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text(MINE)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", "0123456789abcdef")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(line, error, id=f"{page.stem}-{i}")
        for page in PAGES
        for i, (line, error) in enumerate(commands(page))
    ],
)
def test_commands_are_accepted(arguments: list[str], error: str) -> None:
    try:
        assert jobs_of(parse(arguments, heads()))
    except ConfigError as fault:
        assert error
        assert str(fault).startswith(error)
