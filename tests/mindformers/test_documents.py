"""The documents' own snippets, word by word but for the substitutions that stand beside them."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner import AutoModel, AutoTokenizer, BloomConfig, BloomLMHeadModel, pipeline
from lite_runner.config.argv import parse
from lite_runner.config.groups import options_of
from lite_runner.mindir.manifest import read_manifest
from lite_runner.run_modes import heads, resolve
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from tests.paths import ROOT
from tests.tokenizer_files import write_tokenizer

Runner = Callable[..., str]

TESTS = ROOT / "tests"
DOCUMENTS = TESTS / "fixtures/documents"

# -- What a substitution may be; a snippet that needs anything else does not run as it is. --------

_PATH = re.compile(r"""(["']?)(/?)[\w.-]+(/[\w.-]+)+/?\1""")
_NAME = re.compile(r"""(["'])([\w.]+)\1""")
_SIZE = re.compile(r"(\w+ ?= ?)?\d+")


def _paths(old: str, new: str) -> bool:
    """A path, by one in the test's own folder."""
    first, second = _PATH.fullmatch(old), _PATH.fullmatch(new)
    return bool(first and second and first[1] == second[1] and not second[2])


def _models(old: str, new: str) -> bool:
    """The name of a model, by that of a tiny one."""
    first, second = _NAME.fullmatch(old), _NAME.fullmatch(new)
    known = {*options_of("model"), "glm_6b"}
    return bool(first and second and first[2] in known and second[2] in known) and "tiny_" in new


def _sizes(old: str, new: str) -> bool:
    """A number, by another of the same setting."""
    first, second = _SIZE.fullmatch(old), _SIZE.fullmatch(new)
    return bool(first and second and first[1] == second[1])


KINDS: dict[str, Callable[[str, str], bool]] = {
    "path": _paths,
    "model": _models,
    "size": _sizes,
    "device": lambda old, new: (old, new) == ('"Ascend"', '"CPU"'),
}


@dataclass(frozen=True)
class Substitution:
    """`old` becomes `new`. A `typo` is what runs nowhere, whatever mindformers is, and says why."""

    kind: str
    old: str
    new: str
    why: str

    @property
    def allowed(self) -> bool:
        if self.kind == "typo":
            return len(self.why) > 10
        return self.kind in KINDS and KINDS[self.kind](self.old, self.new)


@dataclass(frozen=True)
class Snippet:
    """A script or a command at a place: 003:16 begins in line 16 of document 003."""

    place: str
    code: str
    is_command: bool
    substitutions: tuple[Substitution, ...]

    @property
    def runnable(self) -> str:
        code = self.code
        for substitution in self.substitutions:
            assert substitution.old in code, f"{self.place}: {substitution.old} is not in it"
            code = code.replace(substitution.old, substitution.new)
        return code

    def write(self, folder: Path) -> str:
        path = folder / f"{self.place.replace(':', '_')}.py"
        path.write_text(self.runnable, encoding="utf-8")
        return path.name


def _read(path: Path) -> list[Snippet]:
    return [
        Snippet(
            f"{path.stem}:{entry['lines'].split('-')[0]}",
            entry.get("code") or entry["command"],
            "command" in entry,
            tuple(
                Substitution(one["kind"], one["from"], one["to"], one.get("why", ""))
                for one in entry["substitutions"]
            ),
        )
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


SNIPPETS = {one.place: one for path in sorted(DOCUMENTS.glob("*.yaml")) for one in _read(path)}


def test_a_substitution_is_what_it_says() -> None:
    every = [(place, one) for place, snippet in SNIPPETS.items() for one in snippet.substitutions]
    assert every and [(place, one) for place, one in every if not one.allowed] == []


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("path", '"/path/to/x"', '"tiny_llama"'),
        ("path", '"/path/to/x"', '"/etc/passwd"'),
        ("path", "AutoModel", "lite/AutoModel"),
        ("model", '"gpt2"', '"gpt2"'),
        ("model", '"text_generation"', '"tiny_gpt2"'),
        ("size", "max_length=20", "min_length=20"),
        ("size", "use_past=True", "use_past=False"),
        ("device", '"Ascend"', '"GPU"'),
        ("typo", "from", "import"),
        ("other", "a", "b"),
    ],
)
def test_nothing_else_may_be_substituted(kind: str, old: str, new: str) -> None:
    assert not Substitution(kind, old, new, "").allowed


# -- What the snippets that run on one process say. -----------------------------------------------

BEIJING = ["I love Beijing, because", "LLaMA is a", "Huawei is a company that"]
CHINESE = ["中国的首都是哪个城市？", "你好", "请介绍一下华为", BEIJING[0]]  # noqa: RUF001
SKY = ["what color is the sky?", "Translate to English: Je t’aime."]  # noqa: RUF001
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
QUESTIONS = [
    "why the earth is unique?",
    "why the sky is blue?",
    "write a job application for a data scientist and explain your related work experience.",
]
LLAMA_CKPT, BLOOM_CKPT = "path/to/llama2_7b.ckpt", "path/to/bloom.ckpt"
SMALL_BLOOM = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}
LLAMA_YAML = """
load_checkpoint: path/to/llama2_7b.ckpt
trainer: {model_name: tiny_llama}
model:
  model_config: {type: LlamaConfig, seq_length: 256}
  arch: {type: LlamaForCausalLM}
"""
BLOOM_YAML = """
trainer: {model_name: tiny_bloom}
model:
  model_config: {type: BloomConfig, seq_length: 256, use_past: True}
  arch: {type: BloomLMHeadModel}
infer:
    prefill_model_path: "path/bloom/bloom_560m_prefill.mindir"
    increment_model_path: "path/bloom/bloom_560m_inc.mindir"
    infer_seq_length: 256
    model_type: mindir
"""
RANK_TABLE = {
    "version": "1.0",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "127.0.0.1",
            "device": [
                {"device_id": str(rank), "device_ip": f"192.0.2.{rank}", "rank_id": str(rank)}
                for rank in range(2)
            ],
            "host_nic_ip": "reserve",
        }
    ],
    "status": "completed",
}
GE = "[ascend_context]\nplugin_custom_ops=All\nprovider=ge\n"
FILES = {
    "path/to/llama2_7b.yaml": LLAMA_YAML,
    "configs/llama2/predict_llama2_7b.yaml": LLAMA_YAML,
    "configs/bloom/run_bloom_560m.yaml": BLOOM_YAML,
    "path/ge_config.ini": GE,
    "path/test_model_dir/test.yaml": BLOOM_YAML.partition("infer:")[0],
    "path/test_model_dir/config.ini": GE,
}


def ids(model: Any, prompts: list[str], **options: Any) -> list[list[int]]:
    """A model's tokens for texts, one at a time."""
    return [model.generate(list(one.encode()), **options)[0] for one in prompts]


def texts(model: Any, prompts: list[str], **options: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained("tiny_llama")
    return [tokenizer.decode(row) for row in ids(model, prompts, **options)]


def entries(rows: list[str]) -> list[dict[str, list[str]]]:
    return [{"text_generation_text": [row]} for row in rows]


def lines(items: list[Any]) -> str:
    return "".join(f"{item}\n" for item in items)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the snippets run: the files that they name, and their outputs."""
    folder = tmp_path_factory.mktemp("documents")
    lay_out(folder)
    return folder


def lay_out(folder: Path) -> None:
    """The files that the documents name, tiny."""
    (folder / "path/to").mkdir(parents=True)
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=x"], heads()))
    model = config.model_config()
    assert model is not None
    write_ckpt(folder / LLAMA_CKPT, random_checkpoint(model, seed=5))
    bloom = BloomConfig(**SMALL_BLOOM).run_config().model_config()
    assert bloom is not None
    write_ckpt(folder / BLOOM_CKPT, random_checkpoint(bloom, seed=6))
    (folder / "path/to/checkpoint.ckpt").symlink_to(folder / LLAMA_CKPT)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    write_tokenizer(byte_tokenizer(), folder / "path/to")


@pytest.fixture(scope="module")
def runner(folder: Path, lite_python: Path) -> Runner:
    """`runner(*words)` is `python *words` as a user of lite_runner.mindformers types it."""

    def run(*words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "lite_runner.mindformers", *words],
            cwd=folder,
            env={
                **os.environ,
                "GLOG_v": "3",
                "LITE_RUNNER_CACHE": str(folder / "cache"),
                "LITE_RUNNER_LITE_PYTHON": str(lite_python),
            },
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def command(place: str) -> list[str]:
    """The words of a command after `python`."""
    python, *words = shlex.split(SNIPPETS[place].runnable.replace("\\\n", " "))
    assert python == "python"
    return words


def output_of(folder: Path, place: str, error: str = "") -> str:
    """The output of a snippet that ended as expected."""
    script = folder / f"{place.replace(':', '_')}.py"
    assert Path(f"{script}.err").read_text(encoding="utf-8") == error
    with Path(f"{script}.out").open(encoding="utf-8", newline="") as out:
        return out.read()


def expected_002_206(folder: Path) -> str:
    model = AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=folder / LLAMA_CKPT)
    return lines(entries(texts(model, BEIJING, max_length=128)))


def expected_002_246(folder: Path) -> str:
    model = AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=folder / LLAMA_CKPT)
    return lines(texts(model, BEIJING, max_length=128))


def expected_003_16(_folder: Path) -> str:
    return lines([texts(AutoModel.from_pretrained("tiny_llama"), CHINESE[:1], max_length=128)])


def expected_003_56(_folder: Path) -> str:
    return lines([texts(AutoModel.from_pretrained("tiny_llama"), CHINESE, max_length=128)])


def expected_003_97(_folder: Path) -> str:
    prompt = ["An increasing sequence: one,"]
    return lines(texts(AutoModel.from_pretrained("tiny_gpt2"), prompt, max_length=40))


def expected_004_278(_folder: Path) -> str:
    return lines(texts(AutoModel.from_pretrained("tiny_bloom"), SKY[:1], max_length=100))


def expected_004_297(_folder: Path) -> str:
    model = AutoModel.from_pretrained("tiny_bloom")
    return lines([entries(texts(model, SKY, max_length=256))])


def expected_004_682(_folder: Path) -> str:
    return lines(texts(AutoModel.from_pretrained("tiny_bloom"), SKY, max_length=100))


def expected_000_246(_folder: Path) -> str:
    infer = pipeline("text_generation", "tiny_bloom", add_special_tokens=False)
    return lines([infer("I love Beijing,because")])


EXPECTED: dict[str, Callable[[Path], str]] = {
    "000:246": expected_000_246,
    "000:271": expected_000_246,
    "000:305": expected_000_246,
    "000:330": expected_000_246,
    "002:206": expected_002_206,
    "002:246": expected_002_246,
    "003:16": expected_003_16,
    "003:56": expected_003_56,
    "003:97": expected_003_97,
    "004:278": expected_004_278,
    "004:297": expected_004_297,
    "004:682": expected_004_682,
}
OTHERS = ["000:135", "001:107", "004:465", "004:556"]  # see below
COMMANDS = ["000:189", "000:213", "002:76"]
RANKS = ["004:804", "004:886"]  # chat.py, and run_chat.sh that starts it


@pytest.fixture(scope="module")
def exported(folder: Path, runner: Runner) -> list[Path]:
    """The pair of graphs that the document's command makes."""
    runner(*command("000:189"))
    pair = [folder / f"path/bloom/bloom_560m_{name}.mindir" for name in ("prefill", "inc")]
    for path, name in zip(pair, ("prefill_graph", "inc_graph"), strict=True):
        (folder / f"path/test_model_dir/bloom_{name}.mindir").symlink_to(path)
    return pair


@pytest.fixture(scope="module")
def ran(folder: Path, runner: Runner, exported: list[Path]) -> Path:
    """All scripts, one after another in one process; what they say lies beside them."""
    assert all(path.is_file() for path in exported)
    scripts = [SNIPPETS[place].write(folder) for place in [*EXPECTED, *OTHERS]]
    runner(str(TESTS / "mindformers/drive.py"), *scripts)
    return folder


@pytest.mark.parametrize("place", EXPECTED)
def test_it_says_what_the_api_says(ran: Path, place: str) -> None:
    assert output_of(ran, place) == EXPECTED[place](ran)


def test_a_script_that_samples_prints_what_it_drew(ran: Path) -> None:
    given, tokens, text = output_of(ran, "001:107").split("\n", 2)
    drawn = ast.literal_eval(tokens)
    assert ast.literal_eval(given) == list(BEIJING[0].encode()) == drawn[: len(BEIJING[0])]
    assert len(BEIJING[0]) < len(drawn) <= len(BEIJING[0]) + 128
    assert text == AutoTokenizer.from_pretrained("tiny_llama").decode(drawn) + "\n"


def test_a_trainer_exports(ran: Path) -> None:
    assert output_of(ran, "000:135") == ""
    manifest = read_manifest(ran / "outputs/llama2_7b_mindir")
    assert (manifest.model.num_layers, manifest.model.hidden_size) == (2, 32)


def test_a_chat_asks_when_its_questions_are_answered(ran: Path) -> None:
    out = output_of(ran, "004:465", "EOFError: EOF when reading a line")
    config = BloomConfig(**SMALL_BLOOM, checkpoint_name_or_path=str(ran / BLOOM_CKPT))
    config.seq_length = 256
    model = BloomLMHeadModel(config)
    prompts = [ALPACA.format(question) for question in QUESTIONS]
    drawn = texts(model, prompts, max_length=256, eos_token_id=2)
    assert out == lines(drawn) + "please input your question: "


def test_a_script_with_flags_prints_its_config_and_its_texts(ran: Path) -> None:
    out = output_of(ran, "004:556").splitlines()
    assert out[0].startswith("config is: ") and "num_layers: 2" in out
    assert "\n".join(out).endswith(lines(pipeline("text_generation", "tiny_bloom")(SKY))[:-1])


def test_an_exported_pair_is_asked(runner: Runner, exported: list[Path]) -> None:
    out = runner(*command("000:213"), stdin="I love Beijing,because\nexit\n")
    expected = expected_000_246(exported[0])
    assert expected.removeprefix("[{'text_generation_text': ")[:40] in out


def test_a_yaml_of_run_mindformer_predicts(runner: Runner, folder: Path) -> None:
    out = runner(*command("002:76"))
    model = AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=folder / LLAMA_CKPT)
    results = entries(texts(model, BEIJING[:1]))
    assert out == lines(results)
    assert (folder / "text_generation_result.txt").read_text("utf-8") == str(results)


def test_a_loop_over_ranks_chats(folder: Path) -> None:
    """run_chat.sh and chat.py as they are: only `python3` is the command of this test. Shard then
    Load is in tests/api/test_context.py, with the same calls."""
    chat, loop = (SNIPPETS[place].runnable for place in RANKS)
    (folder / "chat.py").write_text(chat, encoding="utf-8")
    (folder / "path/hccl_2p.json").write_text(json.dumps(RANK_TABLE))
    python = folder / "bin/python3"
    python.parent.mkdir(exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -m lite_runner.mindformers "$@"\n')
    python.chmod(0o755)
    subprocess.run(
        ["bash", "-c", f"{loop}\nwait"],
        cwd=folder,
        env={**os.environ, "GLOG_v": "3", "PATH": f"{python.parent}:{os.environ['PATH']}"},
        timeout=300,
        check=True,
    )
    for rank in range(2):
        log = (folder / f"minformers_{rank}.log").read_text(encoding="utf-8")
        assert expected_004_682(folder) in log, log


def test_every_snippet_runs() -> None:
    commands = {place for place, snippet in SNIPPETS.items() if snippet.is_command}
    assert {*SNIPPETS} == {*EXPECTED, *OTHERS, *COMMANDS, *RANKS}
    assert commands == {*COMMANDS, RANKS[1]}
