"""benchmarks/picture.py over tables of made-up figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def run(engine: str, decode: float, batch: int = 1) -> dict[str, Any]:
    figures = {"prefill_tok_s": 900.0, "first_token_s": 0.5, "peak_rss_mib": 600.0}
    return {"engine": engine, "batch": batch, "decode_tok_s": decode, **figures}


def test_a_group_of_bars_a_table(tmp_path: Path) -> None:
    float32 = [run("lite-runner (native, avx512 kernels, none)", decode) for decode in (70, 72, 99)]
    float32 += [run("llama.cpp F32", 58), run("llama.cpp F32", 1313, batch=32)]
    eight = [run("lite-runner (native, avx512 kernels, a16w8)", 211)]
    eight += [run("lite-runner (native, avx512 kernels, a8w8)", 1717), run("llama.cpp Q8_0", 139)]
    files = [tmp_path / "float32-128.json", tmp_path / "8-bits-128.json"]
    for file, runs in zip(files, (float32, eight), strict=True):
        file.write_text(json.dumps(runs))
    svg = tmp_path / "found.svg"
    command = [sys.executable, str(ROOT / "benchmarks/picture.py"), str(svg), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    texts = [text.text for text in ElementTree.parse(svg).getroot().iter(f"{SVG}text")]
    assert texts.count("float32") == texts.count("8 bits") == 4  # below each panel
    assert texts.count("lite-runner (native)") == texts.count("llama.cpp") == 1  # the legend
    assert {"decode", "prefill", "process start to first token", "peak memory"} <= set(texts)
    assert {"72.0", "58.0", "211", "139.0"} <= set(texts)  # the median, of the engine's first row
    assert not {"1313", "1717"} & set(texts)
