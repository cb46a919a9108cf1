"""GGUF files in their own blocks, whose inputs are rounded to 8 bits (quant=null or a8) or to 16
(quant=a16), and files in parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lite_runner.config.argv import parse
from lite_runner.model import ModelFiles
from lite_runner.model.exported_model import ExportedModel
from lite_runner.model.locate import locate
from lite_runner.output.comparison import _quant_of_other
from lite_runner.run_modes import heads, predict, resolve
from lite_runner.system import environment
from tests.paths import REFERENCE
from tests.refusals import refused
from tests.tiny_gguf import write_tiny_gguf

Run = Callable[..., dict[str, Any]]
PREDICT = ["predict_data=['some words','others']", "max_new_tokens=12", "logprobs=2"]


def test_every_way_to_compute_gives_the_same(run: Run, small_gguf: Path) -> None:
    """From the cache and in memory, at the first start and at later ones."""
    line = [f"model={small_gguf}", *PREDICT]
    ways: tuple[list[str], ...] = ([], ["quant=a8"], ["context.cache=false"])
    first, again, uncached = (run(*line, *more) for more in ways)
    assert first["engine"].startswith("native, ")
    assert first["provenance"]["quant"] == "a8"
    assert first["results"] == again["results"] == uncached["results"]
    finer = run(*line, "quant=a16")
    assert finer["provenance"]["quant"] == "a16"
    assert finer["results"] != first["results"]  # log probabilities


def test_a_comparison_keeps_16_bits(
    run: Run, small_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other backend rounds no inputs, so that its graphs are those of floats."""
    line = [f"model={small_gguf}", "predict_data=some words", "max_new_tokens=2"]
    environment.import_mindspore()
    from lite_runner.backends.mindspore import backend

    key, keys = backend._graph_key, []
    monkeypatch.setattr(backend, "_graph_key", lambda *of: keys.append(key(*of)) or keys[-1])
    result = run(*line, "backend=ms", "compare_backend=native")
    assert [one["options"]["integer_input"] for one in keys] == [False]
    assert result["comparison"]["same"] and "quant" not in result["provenance"]
    other = json.loads(Path("outputs/latest/compare/result.json").read_text(encoding="utf-8"))
    assert other["provenance"]["quant"] == "a16"


@pytest.mark.parametrize(
    ("checkpoint", "more", "quant"),
    [("small.gguf", [], "a16"), ("small.gguf", ["quant=none"], "none"), ("floats.gguf", [], None)],
)
def test_a_comparison_with_an_export_keeps_16_bits(
    small_gguf: Path, checkpoint: str, more: list[str], quant: str | None
) -> None:
    """Only the other run locates the weights of the graphs."""
    write_tiny_gguf(Path("floats.gguf"))
    line = ["backend=mslite", "infer.model_dir=x", "model=auto", "predict_data=some words"]
    line += [f"load_checkpoint={small_gguf.with_name(checkpoint)}", "compare_backend=native"]
    config, _ = resolve(parse([*line, *more], heads()))
    assert isinstance(config, predict.Config) and config.compared is not None
    exported = cast(ExportedModel, "a folder of graphs")
    model = locate(config.compared.source).model
    files = ModelFiles("x", None, model, 0, exported)
    assert _quant_of_other(config.compared.source, files) == quant


def test_the_cache_keeps_both(
    run: Run, small_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [f"model={small_gguf}", *PREDICT]
    for quant in ("quant=a16", "quant=a8"):
        run(*line, quant)
        assert "in the cache from now on" in capsys.readouterr().err
    for quant in ("quant=a16", "quant=a8"):
        run(*line, quant)
        assert "in the cache from now on" not in capsys.readouterr().err


def test_blocks_are_not_rounded_to_16_bits(
    run: Run, small_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compute_dtype: float16`, as MindFormers' yamls have it, is about the floats of a model."""
    line, half = [f"model={small_gguf}", *PREDICT], "model.model_config.compute_dtype=float16"
    plain, kept = run(*line), run(*line, half)
    assert "the file's blocks stay as they are" in capsys.readouterr().err
    assert kept["results"] == plain["results"]
    assert run(*line, half, "quant=none")["results"] != plain["results"]


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        (["backend=ms"], 2, "quant=a8 needs backend=native"),
        (["backend=ms", "quant=a16"], 2, "quant=a16 needs backend=native"),
        (["model=tiny_llama"], 2, "quant=a8 needs a quantized GGUF file"),
        (["model=floats"], 4, "quant=a8 computes with the blocks of a quantized GGUF file"),
        (["model=floats", "quant=a16"], 4, "leave quant= out, or quant=a16w8"),
        (["quant_group=32"], 2, "quant_group=32 needs quant=a16w4"),
        (["model.model_config.use_past=false"], 2, "quant=a8 is not available with"),
    ],
)
def test_a8_is_refused_with(
    small_gguf: Path, capsys: pytest.CaptureFixture[str], settings: list[str], code: int, says: str
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


def test_a_split_file_is_read_from_any_part_or_its_folder(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("parts").mkdir()
    write_tiny_gguf(Path("whole.gguf"))
    write_tiny_gguf(Path("parts/x.gguf"), split=5)
    parts = sorted(Path("parts").iterdir())
    assert [part.name for part in parts] == [f"x-0000{one}-of-00003.gguf" for one in (1, 2, 3)]
    whole = run("model=whole.gguf", *PREDICT)
    for path in (*parts, Path("parts")):
        capsys.readouterr()
        assert run(f"model={path}", *PREDICT)["results"] == whole["results"]
        packed = "in the cache from now on" in capsys.readouterr().err
        assert packed == (path == parts[0])  # whichever part was named
    content = bytearray(parts[1].read_bytes())
    content[-1] ^= 1
    parts[1].write_bytes(content)
    assert run(f"model={parts[0]}", *PREDICT)["results"] != whole["results"]
    assert "in the cache from now on" in capsys.readouterr().err
    parts[1].unlink()
    refused([f"model={parts[2]}", *PREDICT], 4)
    assert f"there is no {parts[1].name}" in capsys.readouterr().err
