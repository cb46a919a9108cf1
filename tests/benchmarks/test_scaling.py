"""benchmarks/scaling.py and the chart that it draws, over an engine that computes its figures."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.paths import ROOT

FOLDER = ROOT / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"

# Reads 1000 tokens/s, its step takes 1 ms and another one for each 1000 tokens of context.
ENGINE = """
import json, sys
prompts = json.load(open(sys.argv[2]))
context = len(prompts[0]) + int(sys.argv[3])
print(json.dumps({
    "engine": sys.argv[1],
    "decode_tok_s": len(prompts) * 1000 / (1 + context / 1000),
    "prefill_tok_s": 1000.0,
    "peak_rss_mib": 100.0 + context,
}))
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's scripts as modules, as they import each other; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("bench", "scaling"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_figures_and_chart(tmp_path: Path) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text(ENGINE)
    template = f"{shlex.quote(sys.executable)} {shlex.quote(str(engine))}"
    names = ["ours", "a < b"]
    engines = [
        f"--engine={template} {shlex.quote(name)} {{prompts}} {{new_tokens}}" for name in names
    ]
    sizes = ["--batches", "1", "4", "--contexts", "128", "1024", "8192", "--rounds", "1"]
    files = ["--json", str(tmp_path / "found.json"), "--svg", str(tmp_path / "found.svg")]
    command = [sys.executable, str(FOLDER / "scaling.py"), *engines, *sizes, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    found = json.loads((tmp_path / "found.json").read_text())
    over_batch = [(p["engine"], p["batch"], p["decode_tok_s"]) for p in found["over_batch"]]
    assert over_batch == [(name, batch, batch * 1000 / 1.144) for batch in (1, 4) for name in names]
    over_context = [p for p in found["over_context"] if p["engine"] == "ours"]
    assert [p["context"] for p in over_context] == [128, 1024, 8192]
    assert [p["peak_rss_mib"] for p in over_context] == [228, 1124, 8292]

    root = ElementTree.parse(tmp_path / "found.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("a < b") == 1  # in the legend
    assert texts.count("8192") == texts.count("context, tokens") == 3
    assert {"tokens/s", "ms", "MiB", "batch, rows"} <= set(texts)


@pytest.mark.usefixtures("scripts")
def test_prefill_of_a_part_is_what_the_longer_prompt_takes_more() -> None:
    scaling = module("scaling")
    new = scaling.NEW_TOKENS
    # 100 tokens in 1 s, 300 in 2 s: the 200 between took 1 s. The last is noise.
    rates = ((100, 100.0), (300, 150.0), (400, 400.0))
    points = [{"context": tokens + new, "prefill_tok_s": rate} for tokens, rate in rates]
    assert scaling.prefill_speeds(points) == [(100 + new, 100.0), (300 + new, 200.0)]
