"""Every example runs, and the offline ones say what the online one does."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import os
import runpy
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lite_runner import app, build_context
from lite_runner.config.argv import parse
from lite_runner.mindir.manifest import read_manifest
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf

EXAMPLES = ROOT / "examples"


def run(cache: Path, script: Path, *arguments: str, stdin: str = "") -> str:
    """The standard output of a script that is run in this process."""
    printed = io.StringIO()
    with (
        mock.patch.dict("os.environ", {"LITE_RUNNER_CACHE": str(cache)}),
        mock.patch("sys.argv", [str(script), *arguments]),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(printed),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            assert ended.code == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def by_name(cache: Path, lite_python: Path) -> str:
    """The output of offline_by_name.py, after which there is an exported model in the cache."""
    assert lite_python.is_file()
    return run(cache, EXAMPLES / "offline_by_name.py", "tiny_llama")


@pytest.fixture(scope="module")
def graph(cache: Path, by_name: str) -> Path:
    """The one file of that model."""
    (found,) = cache.glob("artifacts/*/*.mindir")
    return found


@pytest.fixture(scope="module")
def online(cache: Path) -> str:
    """The output of pipeline_online.py."""
    return run(cache, EXAMPLES / "pipeline_online.py", "tiny_llama")


def test_a_pipeline_online(online: str) -> None:
    assert online.startswith("{'text_generation_text': ['I love Beijing, because")
    assert len(online.splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [("streaming.py", "An increasing sequence: one,"), ("batch_generate.py", "中国的首都是")],
)
def test_generate(cache: Path, name: str, text: str) -> None:
    assert text in run(cache, EXAMPLES / name, "tiny_llama")


@pytest.mark.usefixtures("smollm2_gguf")
def test_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    table, _, answer, _ = values_of("notebook.ipynb")
    assert [one.text.split(".")[0] for one in table] == [" Paris", " Rome"]
    assert "The capital of France is Paris." in capsys.readouterr().out
    assert json.loads(answer) == {"city": "Paris"}


@pytest.mark.usefixtures("smollm2_gguf")
def test_a_notebook_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    table, answer, _ = values_of("adapters.ipynb")
    pirate, base = (one.text for one in table)
    assert "matey" in pirate and "matey" not in base
    assert answer[0].text and "<table>" in answer._repr_html_()


def values_of(notebook: str) -> list[Any]:
    """The values of a notebook's cells, run one after another."""
    cells = json.loads((EXAMPLES / notebook).read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    return [
        asyncio.run(value_of("".join(cell["source"]), names))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


async def value_of(cell: str, names: dict[str, Any]) -> Any:
    """What a cell's last expression is; as in IPython it may `await`."""
    *before, last = ast.parse(cell).body
    assert isinstance(last, ast.Expr | ast.For)
    if isinstance(last, ast.Expr):
        last = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
    tree = ast.fix_missing_locations(ast.Module([*before, last], []))
    code = compile(tree, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if (running := types.FunctionType(code, names)()) is not None:
        await running
    return names.get("_")


def test_a_script_with_flags_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK_ID", raising=False)
    script = EXAMPLES / "predict_custom.py"
    flags = ["--model", "tiny_llama", "--device_target", "CPU", "--use_past", "True"]
    output = run(cache, script, *flags)
    assert output.count("'text_generation_text': [") == 2 and "what color is the sky?" in output
    ranks = tmp_path / "rank_0"
    ranks.mkdir()
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=x"], heads()))
    model = config.model_config()
    assert model is not None
    for name, seed in (("1.ckpt", 5), ("2.ckpt", config.checkpoint_seed)):
        write_ckpt(ranks / name, random_checkpoint(model, seed))
    for newest, same in (("1.ckpt", False), ("2.ckpt", True)):
        os.utime(ranks / newest, (0, 4e9 + same))
        again = run(cache, script, *flags, "--checkpoint_path", str(tmp_path))
        assert (again == output) is same
    build_context({})  # what the script chose is not the next test's choice


def test_exporting_with_a_trainer(cache: Path, tmp_path: Path, lite_python: Path) -> None:
    assert lite_python.is_file()
    folder = run(cache, EXAMPLES / "trainer_export.py", str(tmp_path)).strip()
    manifest = read_manifest(Path(folder))
    assert (manifest.model.hidden_size, manifest.model.seq_length) == (32, 512)


def test_offline_says_what_online_does(online: str, by_name: str) -> None:
    assert by_name == f"[{online.splitlines()[0]}]\n"


@pytest.mark.parametrize("name", ["offline_by_paths", "offline_by_folder", "offline_by_config"])
def test_offline_ways_agree(cache: Path, by_name: str, graph: Path, name: str) -> None:
    place = graph.parent if name == "offline_by_folder" else graph
    assert run(cache, EXAMPLES / f"{name}.py", "tiny_llama", str(place)) == by_name


@pytest.mark.usefixtures("registry")
def test_an_operator_in_cpp(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network says what the same weights say with MindSpore's operators alone."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(cache))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    job = "predict_data=abc max_new_tokens=3 logprobs=0".split()
    results = []
    for kind, words in {
        "llama": ["backend=ms"],
        "my_llama": [f"plugins={EXAMPLES / 'custom_operator.py'}"],
    }.items():
        words += [f"load_checkpoint={kind}", *job, f"output_dir=out-{kind}"]
        line = f"run_mode=convert model=tiny.gguf convert_format=huggingface convert_output={kind}"
        assert app.main(line.split()) == 0
        config = tmp_path / kind / "config.json"
        config.write_text(config.read_text().replace('"llama"', f'"{kind}"'))
        assert app.main(["model=auto", *words]) == 0
        result = json.loads((tmp_path / f"out-{kind}/latest/result.json").read_text())
        assert result["engine"] == "mindspore"
        results.append(result["results"][0])
    plain, own = results
    assert own["token_ids"] == plain["token_ids"]
    pairs = zip(own["logprobs"], plain["logprobs"], strict=True)
    differences = [abs(one["logprob"] - other["logprob"]) for one, other in pairs]
    assert 0 < max(differences) < 1e-4  # not the same sums


def test_run_infer_main(cache: Path, graph: Path) -> None:
    script = ROOT / "scripts" / "run_infer_main.py"
    flags = ["--model_dir", str(graph.parent), "--seq_length", "256", "--max_length", "64"]
    output = run(cache, script, *flags, stdin="I love Beijing, because\nexit\nmore\n")
    assert output.count("one token takes ") >= 10
    assert "\n['I love Beijing, because" in output and "more" not in output
    flags += ["--stream", "True", "--predict_data", "I love Beijing, because"]
    streamed = run(cache, script, *flags)
    assert streamed.startswith("I love Beijing, because") and "one token" not in streamed
