"""A GGUF file in its own blocks: quant=null, and quant=a8, which rounds the inputs to 8 bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REFERENCE
from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
PREDICT = ["predict_data=['some words','others']", "max_new_tokens=12", "logprobs=2"]


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


def test_every_way_to_compute_gives_the_same(run: Run, small_gguf: Path) -> None:
    """With and without MindSpore, from a folder and from the cache."""
    line = [f"model={small_gguf}", "quant=a8", *PREDICT]
    online = run(*line)
    offline = run(*line, "backend=mslite", "engine=native")
    assert offline["engine"].startswith("native, ")
    assert offline["results"] == online["results"]
    run("run_mode=export", f"model={small_gguf}", "quant=a8", "export.layout=packed")
    (folder,) = Path("outputs").glob("*packed*")
    given = run("backend=mslite", f"infer.model_dir={folder}", *PREDICT)
    assert tokens(given) == tokens(online)
    refused(["backend=mslite", f"infer.model_dir={folder}", "quant=a8w8", *PREDICT], 4)
    finer = run(f"model={small_gguf}", *PREDICT)
    assert finer["results"] != online["results"]  # log probabilities


def test_the_cache_keeps_both(
    run: Run, small_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [f"model={small_gguf}", "backend=auto", *PREDICT]
    for quant in ("quant=null", "quant=a8"):
        run(*line, quant)
        assert "in the cache from now on" in capsys.readouterr().err
    for quant in ("quant=null", "quant=a8"):
        run(*line, quant)
        assert "in the cache from now on" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        (["context.kernels=false"], 2, "quant=a8 needs this project's own operators"),
        (["model=tiny_llama"], 2, "quant=a8 needs a quantized GGUF file"),
        (["model=floats"], 4, "quant=a8 computes with the blocks of a quantized GGUF file"),
        (["quant_group=32"], 2, "quant_group=32 needs quant=a16w4"),
        (["model.model_config.use_past=false"], 2, "quant=a8 is not available with"),
    ],
)
def test_what_a8_does_not_go_with(
    small_gguf: Path,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    code: int,
    says: str,
) -> None:
    shutil.copytree(REFERENCE / "llama", "floats")
    refused([f"model={small_gguf}", "quant=a8", *PREDICT, *settings], code)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode",
    [
        ["run_mode=convert", "convert_format=huggingface", "convert_output=x"],
        ["run_mode=quantize", "quantize_output=x"],
    ],
    ids=["convert", "quantize"],
)
def test_a8_is_not_written(
    small_gguf: Path, capsys: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    refused([*mode, f"model={small_gguf}", "quant=a8"], 2)
    assert "quant" in capsys.readouterr().err
