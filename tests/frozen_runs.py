"""Texts of dry_run=true, keys of result.json, and exit codes of each run mode.

`python -m tests.frozen_runs` adds to tests/fixtures/frozen/keys/runs.json, of what runs.yaml lists,
what is missing of it; `--overwrite` makes it anew, which is for a change that users are told of.
test_frozen_runs.py compares.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from lite_runner.app import main

FOLDER = Path(__file__).resolve().parent / "fixtures/frozen/keys"
NAMES = ("dry", "results", "exit_codes")


@cache
def typed() -> dict[str, dict[str, str]]:
    """The contents of runs.yaml: `runs`, `dry` and `faults`."""
    found: dict[str, dict[str, str]] = yaml.safe_load((FOLDER / "runs.yaml").read_text("utf-8"))
    return found


def printed(words: str) -> list[str]:
    """The lines of dry_run=true, their figures and paths left out: `memory | needs # MB (...)`."""
    code, text = _run(f"{words} dry_run=true")
    return [f"exit code {code}", *map(_without_figures, text.splitlines())]


def result_keys(words: str) -> list[str]:
    """Every dotted key of the result.json that a run writes, with the type of its value."""
    code, _ = _run(words)
    if code:
        return [f"exit code {code}"]
    return sorted(set(_keys(json.loads(Path("outputs/latest/result.json").read_text("utf-8")), "")))


def _run(words: str) -> tuple[int, str]:
    """The exit code and standard output of a command line, run in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code = main([*words.split(" "), "context.threads=2", "verbosity=0"])
    return code, out.getvalue()


def _without_figures(line: str) -> str:
    line = line.replace(str(Path.cwd()), "<here>")
    line = re.sub(r"is free: .*|verified in .*|(?<=own kernels )\(\w+\)", "...", line)  # of here
    line = re.sub(r"\d[\d.,]* [kMG]?B\b", "# B", line)
    return re.sub(r" {2,}", " | ", re.sub(r"(?<!\w)\d[\d,.]*\b", "#", line).strip())


def _keys(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _keys(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _keys(inner, f"{prefix}[]")
    else:
        yield f"{prefix}: {type(value).__name__}"


def found() -> dict[str, dict[str, Any]]:
    """All that is frozen, by NAMES. To be called `beside` the files."""
    dry, results = {}, {}
    for name, words in typed()["runs"].items():
        dry[name] = printed(words)
        results[name] = result_keys(words)
    dry |= {name: printed(words) for name, words in typed()["dry"].items()}
    codes = {name: _run(words)[0] for name, words in typed()["faults"].items()}
    return {"dry": dry, "results": results, "exit_codes": codes}


def stored() -> dict[str, dict[str, Any]]:
    every: dict[str, dict[str, Any]] = json.loads((FOLDER / "runs.json").read_text("utf-8"))
    return every


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """With the files that runs.yaml names in `folder`, which is the current one."""
    (folder / "text.txt").write_text("Some words, and others. " * 20, encoding="utf-8")
    (folder / "prompts_long.txt").write_text("word " * 900, encoding="utf-8")
    (folder / "broken.safetensors").write_bytes(b"\xff" * 64)
    (folder / "adapters.json").write_text('{"en": "en"}', encoding="utf-8")
    _write_adapter(folder / "en")
    before, cache_before = Path.cwd(), os.environ.get("LITE_RUNNER_CACHE")
    os.chdir(folder)
    os.environ["LITE_RUNNER_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(before)
        if cache_before is None:
            del os.environ["LITE_RUNNER_CACHE"]
        else:
            os.environ["LITE_RUNNER_CACHE"] = cache_before


def _write_adapter(folder: Path) -> None:
    """An adapter of rank 2 of one matrix a layer of model=tiny_llama, as peft writes it."""
    folder.mkdir()
    tensors = {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        tensors[f"{module}.lora_A.weight"] = np.full((2, 64), 0.1, np.float32)
        tensors[f"{module}.lora_B.weight"] = np.full((128, 2), 0.1, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    before = {name: {} for name in NAMES} if "--overwrite" in sys.argv else stored()
    with tempfile.TemporaryDirectory() as folder, beside(Path(folder)):
        now = {name: inner | before[name] for name, inner in found().items()}
    path = FOLDER / "runs.json"
    path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")
