"""run_infer_main.py with the families of ChatGLM: exported, and asked by the family's name."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner import AutoModel, AutoTokenizer
from lite_runner.api.exported import sizes_in_graphs
from lite_runner.app import main
from tests.chatglm_folders import write_chatglm3, write_chatglm_6b
from tests.paths import ROOT

QUESTION = "The ship left"
FLAGS = ["--max_length", "24", "--predict_data", QUESTION]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models glm and glm3, exported as pairs glm_pair and glm3_pair; of the second the graphs lie
    in glm3_graphs too, with nothing beside them."""
    folder = tmp_path_factory.mktemp("chatglm")
    write_chatglm_6b(folder / "glm")
    write_chatglm3(folder / "glm3")
    for name in ("glm", "glm3"):
        export = ["run_mode=export", f"model={folder / name}", "export.layout=static_pair"]
        output = [f"export_output={folder / name}_pair", "infer.infer_seq_length=32"]
        assert main([*export, *output]) == 0
    (folder / "glm3_graphs").mkdir()
    for path in (folder / "glm3_pair").glob("*.mindir"):
        shutil.copy(path, folder / "glm3_graphs")
    return folder


def graphs(folder: Path) -> list[Path]:
    return [next(folder.glob(f"*_{name}_graph.mindir")) for name in ("prefill", "inc")]


@pytest.fixture
def answer(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`answer("--model_name", "glm", ...)`: what the script prints last."""
    monkeypatch.chdir(here)

    def run(*flags: str) -> str:
        ask: Any = runpy.run_path(str(ROOT / "scripts/run_infer_main.py"))["main"]
        assert ask([*flags, *FLAGS]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    return run


def expected(folder: Path, *, special: bool) -> str:
    """The expected text of the checkpoint, printed as the script prints it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(QUESTION, add_special_tokens=special)["input_ids"]
    ids_generated = AutoModel.from_pretrained(folder).generate(ids, max_length=24)
    return str([tokenizer.decode(ids_generated[0], skip_special_tokens=True)])


def test_a_chatglm_6b_is_asked(here: Path, answer: Callable[..., str]) -> None:
    """Without special tokens, as is the script's default: what ends a prefix is there all the
    same, since the model answers nothing without."""
    found = answer("--model_name", "glm", "--model_dir", "glm_pair")
    assert found == expected(here / "glm", special=True)


@pytest.mark.parametrize("special", [True, False])
def test_a_chatglm3_is_asked_by_its_graphs_alone(
    here: Path, answer: Callable[..., str], special: bool
) -> None:
    prefill, increment = map(str, graphs(here / "glm3_graphs"))
    paths = ["--prefill_model_path", prefill, "--increment_model_path", increment]
    flags = ["--tokenizer_path", "glm3", "--add_special_tokens", str(special)]
    found = answer("--model_name", "glm3", *paths, *flags)
    assert found == expected(here / "glm3", special=special)


@pytest.mark.parametrize("family", ["glm", "glm2", "glm3"])
def test_sizes_that_the_graphs_of_a_family_tell(here: Path, family: str) -> None:
    name = "glm" if family == "glm" else "glm3"
    config = json.loads((here / name / "config.json").read_text(encoding="utf-8"))
    sizes = sizes_in_graphs(family, graphs(here / f"{name}_pair"))
    assert sizes.pop("num_heads") == config["num_attention_heads"]
    assert sizes.pop("vocab_size") == 480
    assert sizes == {size: config[size] for size in sizes}
    assert ("inner_hidden_size" if family == "glm" else "multi_query_group_num") in sizes
