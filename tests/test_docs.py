"""README and docs/: links lead somewhere, commands and Python blocks run, output is as shown.

Each page's commands run in their order, in a folder that holds the files they name. What does not
run, or runs with a tiny model, is listed in docs.yaml with its reason.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import yaml

from lite_runner import app
from lite_runner.architectures import KNOWN
from lite_runner.config.argv import equivalent_of, parse
from lite_runner.run_modes import heads
from lite_runner.sweep import jobs_of
from lite_runner.system import memory
from tests.doc_folder import TINY, lay_out
from tests.doc_pages import PAGES, Block, Command, anchors, blocks, links, prose
from tests.paths import ROOT

LISTED = yaml.safe_load(Path(__file__).with_name("docs.yaml").read_text(encoding="utf-8"))
NOT_RUN = {command for entry in LISTED["not_run"] for command in entry["commands"]}
FRAGMENTS = {entry["begins"] for entry in LISTED["fragments"]}
STAND_INS: dict[str, dict[str, str]] = LISTED["stand_ins"]
COMMANDS = [
    (page.stem, each) for page in PAGES for block in blocks(page) for each in block.commands()
]

RUN = re.compile(
    r"(?:echo '(?P<stdin>[^']*)' \| )?"
    r"(?:python run_lite\.py|run-lite|python (?P<mindformer>run_mindformer)\.py) (?P<words>.*)"
)
ARGUMENTS = re.compile(r"\brun_lite\.py (.*?)(?: ?(?:&>|2>|>).*)?$")
REDIRECTION = re.compile(r"\s*(?:&>|2>|>) .*$")
MODEL = re.compile(r"--config |(?:model|load_checkpoint|infer\.model_dir)=")
INLINE = re.compile(r"`((?:make|bash|python|pip) [^`]+)`")
# What differs from run to run, or by machine: times, speeds, dates, free memory, instructions; and
# what a sum's last bit decides, by which an input or a weight is rounded: decimals of perplexities,
# how far calibrated integers are from the source, a sampled text.
MEASURED = re.compile(
    r"(?<=^perplexity \d\d)\.\d+|(?<=text that it did not see: perplexity ).*|"
    r"(?<=text that it did not see, with inputs of 16 bits: perplexity ).*|"
    r"(?<=^{\"id\": \"q2\", \"prompt\": \"Once upon a time\", \"text\": ).*|"
    r"(?<=own kernels )\(\w+\)|"
    r"[\d.]+(?= (?:s|tokens/s|GB/s)\b)|(?<=results in )\S+|(?<=, )(?:but )?[\d.]+ GB is free.*$"
)


# -- Links. ---------------------------------------------------------------------------------------


def test_links_lead_somewhere(subtests: pytest.Subtests) -> None:
    for page in [*PAGES, *(ROOT / "docs/zh").glob("*.md")]:
        with subtests.test(page=str(page.relative_to(ROOT))):
            for link in links(page):
                if "://" in link:
                    continue
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), link
                assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_readme() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= {
        link.partition("#")[0] for link in links(PAGES[0])
    }


def test_the_map_of_the_code_has_every_folder() -> None:
    (code,) = (block.text for block in blocks(PAGES[0]) if block.text.startswith("run_lite.py"))
    folders = {path.parent.name for path in (ROOT / "lite_runner").glob("*/__init__.py")}
    assert not [name for name in folders if f"{name}/" not in code]


# -- What runs. -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial contents of every reader's folder."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lay_out(folder)
    return folder


@pytest.fixture
def reader(
    tmp_path: Path, smollm2_gguf: Path, laid_out: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder of somebody who tries a page: the files that its commands name, a cache that
    holds SmolLM2 only, and a key. What its code registers is gone behind it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "pypi").symlink_to(smollm2_gguf.parents[2])
    assert smollm2_gguf.parents[2].name == "pypi"
    folder = Path(shutil.copytree(laid_out, tmp_path / "reader", symlinks=True))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(cache))
    monkeypatch.setenv("MY_KEY", "0123456789abcdef")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setattr(memory, "free_memory", lambda: 64 * 10**9)  # plans depend on it
    with mock.patch.dict(KNOWN):
        yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("registry")
def test_a_page_does_what_it_shows(
    page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for block in blocks(page):
        if block.file.startswith("lite_runner/"):
            if block.text.partition("\n")[2] not in (ROOT / block.file).read_text("utf-8"):
                wrong.append(f"{block.file} has no longer:\n{block.text}")
        elif block.file:
            write(reader / block.file, block.text)
        elif block.language == "python" and block.text.splitlines()[0] not in FRAGMENTS:
            code = block.text.replace('"smollm2_135m"', f'"{TINY}"')
            write(reader / "snippet.py", code)
            runpy.run_path("snippet.py", run_name="__main__")
        for command in block.commands():
            if command.text in NOT_RUN:
                continue
            if command.text.startswith("cat "):
                write(reader / command.text.split()[1], "\n".join([*command.output, ""]))
            elif faults := differences(page.stem, command, monkeypatch, capsys):
                wrong.append("\n  - ".join([f"$ {command.text}", *faults]))
    assert not wrong, "\n".join(wrong)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def differences(
    page: str, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Run a command in this process: what its exit code and output are that the page does not
    say. Output that depends on a stand-in is not compared."""
    line, stood_in = with_stand_ins(page, command)
    typed = RUN.fullmatch(line)
    if typed is None:
        return ["is neither run nor listed in docs.yaml"]
    given = io.BytesIO((typed["stdin"] or "").encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
    capsys.readouterr()
    code = app.main(shlex.split(typed["words"]), mindformer=bool(typed["mindformer"]))
    captured = capsys.readouterr()
    printed = f"{captured.out}{captured.err}"
    fails = any(line.startswith("error: ") for line in command.output)
    if (code != 0) is not fails or "Traceback" in captured.err:
        return [f"exit code {code}", printed]
    if stood_in or command.text in LISTED["other_output"]:
        return []
    lines = {MEASURED.sub("#", line.strip()) for line in printed.splitlines()}
    shown = [MEASURED.sub("#", line.strip()) for line in command.output]
    missing = [f"not printed: {line}" for line in shown if line not in {*lines, "", "..."}]
    return [*missing, printed] if missing else []


def with_stand_ins(page: str, command: Command) -> tuple[str, bool]:
    """A command with the stand-ins of docs.yaml, and whether there are any. SmolLM2 itself runs
    where a page shows what it prints."""
    line = changed = REDIRECTION.sub("", command.text)
    if "dry_run=true" not in line:
        for words, others in STAND_INS.get(page, {}).items():
            changed = re.sub(rf"(?<= ){re.escape(words)}(?= |$)", others, changed)
        if not command.output or line in LISTED["other_output"]:
            changed = changed.replace("model=smollm2_135m", f"model={TINY}")
            if not MODEL.search(changed):
                changed = f"{changed} model={TINY}"
    return changed, changed != line


# -- What does not run, but exists. ---------------------------------------------------------------


@pytest.mark.usefixtures("reader")
def test_commands_that_are_not_run_exist(subtests: pytest.Subtests) -> None:
    for command in sorted({each.text for _, each in COMMANDS} & NOT_RUN):
        with subtests.test(command=command):
            if found := ARGUMENTS.search(command):
                words = [word for word in shlex.split(found[1]) if word != "..."]
                assert jobs_of(parse(words, heads()))
            check_exists(command)


def test_commands_in_the_text_exist(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=page.stem):
            for command in INLINE.findall(prose(page)):
                check_exists(command)


def check_exists(command: str) -> None:
    """Check that the make target, or the script with its flags, exists."""
    words = shlex.split(command)
    while "=" in words[0] and "/" not in words[0]:  # NAME=value before a command
        words.pop(0)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets), command
    elif words[0] in ("bash", "python") and words[1].startswith("scripts/"):
        assert (ROOT / words[1]).is_file(), command
        if words[0] == "python":
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert flags <= set(re.findall(r"--[\w-]+", help_of(words[1]))), command


@cache
def help_of(script: str) -> str:
    """The output of `python script --help`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout


def test_pages_are_the_same_in_chinese(subtests: pytest.Subtests) -> None:
    """Headings, commands, tables, figures, keys and links are; comments are translated."""
    pages = [(path, ROOT / "docs" / path.name) for path in (ROOT / "docs/zh").glob("*.md")]
    assert {path.stem for path, _ in pages} == {page.stem for page in PAGES[1:]}
    for chinese, english in [*pages, (ROOT / "README.zh-CN.md", ROOT / "README.md")]:
        with subtests.test(page=english.name):
            text = chinese.read_text(encoding="utf-8")
            assert page_shape(text) == page_shape(english.read_text(encoding="utf-8"))
            targets = link_targets(chinese)
            assert [target.replace("docs/zh/", "docs/") for target in targets] == link_targets(
                english
            )
            # A Chinese page links to the Chinese page where there is one.
            there = {f"docs/{path.name}" for path, _ in pages}
            assert not there & {target.partition("#")[0] for target in targets}
    chinese, english = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.zh-CN.md", "README.md")
    )
    architectures = english.partition("**Architectures:**")[2].partition("[your")[0]
    for name in re.findall(r"[A-Z][\w.-]*\w", architectures):
        assert name in chinese, name


def page_shape(text: str) -> list[list[str]]:
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    lines = "\n".join(code.findall(text)).splitlines()
    prose = code.sub("", text)
    rows = re.findall(r"^\|.*", prose, re.MULTILINE)
    return [
        [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))],
        re.findall(r"^#+(?= )", prose, re.MULTILINE),
        ["row"] * len(rows),
        [row for row in rows if re.search(r"(llama\.cpp F32|lite-runner) \| \d", row)],
        sorted(re.findall(r"`(.+?)`", re.sub(r"\s+", " ", prose))),
        sorted(set(re.findall(r"\d[\d,.]*\d", prose))),
    ]


def link_targets(page: Path) -> list[str]:
    """The targets of a page's links, from the root, sorted alike in both languages; but to the
    page in the other language."""
    found = []
    for link in re.findall(r"(?<!\[English)\]\((?!README)(.*?)\)", prose(page)):
        path, hash_, anchor = link.partition("#")
        if "://" not in link:
            path = os.path.relpath((page.parent / path if path else page).resolve(), ROOT)
            path = path.replace("README.zh-CN", "README")
        found.append(f"{path}{hash_}{anchor}")
    return sorted(found, key=lambda target: target.replace("docs/zh/", "docs/"))


@pytest.mark.usefixtures("reader")
def test_commands_that_replace_other_programs_are_accepted() -> None:
    """The commands of the table, and that a flag of it is refused with the key beside it."""
    page = page_text("coming-from-llama-cpp")
    typed = re.findall(r"`python run_lite\.py (model=tiny\.gguf .*?)`", page)
    assert len(typed) >= 6
    for line in typed:
        assert jobs_of(parse(shlex.split(line), heads())), line
    rows = re.findall(r"^\| (`-.*?) \| (.*?) \|$", page, re.MULTILINE)
    flags = [(flag, keys) for cell, keys in rows for flag in re.findall(r"`(-+[\w-]+)`", cell)]
    assert len(flags) >= 25
    for flag, keys in flags:
        meant = equivalent_of(flag) or f"{flag.lstrip('-').replace('-', '_')}="
        key = meant.split()[-1 if meant.startswith("run_mode=") else 0].partition("=")[0]
        assert flag in ("-m", "-c") or f"`{key}=" in keys, (flag, meant)


def page_text(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


# -- The lists in docs.yaml. ----------------------------------------------------------------------


def test_nothing_is_listed_that_no_page_says() -> None:
    typed = {command.text for _, command in COMMANDS}
    assert typed >= {*NOT_RUN, *LISTED["other_output"]}
    for page, words in STAND_INS.items():
        lines = " ".join(command.text for stem, command in COMMANDS if stem == page)
        assert all(f" {each} " in lines for each in words), page
    python = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert {block.text.splitlines()[0] for block in python} >= FRAGMENTS
    assert all(entry["why"] for entry in [*LISTED["not_run"], *LISTED["fragments"]])


def test_every_block_has_a_language(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=page.stem):
            known = {"bash", "console", "json", "python", "text", "toml", "yaml"}
            assert {block.language for block in blocks(page)} <= known
            assert not [
                block.text for block in blocks(page) if block.language == "text" and hides(block)
            ]


def hides(block: Block) -> bool:
    """True if a block that is not run has a line that looks like a command."""
    return bool(re.search(r"^(\$ |python |make |bash |pip )", block.text, re.MULTILINE))
