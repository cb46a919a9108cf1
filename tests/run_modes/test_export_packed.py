"""export.layout=packed: layers for this project's operators, which engine=native runs alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import FIXTURES, REFERENCE
from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
PREDICT = ["predict_data=['some words','中文']", "max_new_tokens=6", "eos_token_id=[]"]
EXPORT = ["run_mode=export", "model=tiny_llama", "export.layout=packed"]
FOLDER = Path("outputs/tiny_llama_packed_none")
GIVEN = ["model=tiny_llama", "backend=mslite", f"infer.model_dir={FOLDER}", *PREDICT]


def write_model() -> None:
    """A checkpoint with a tokenizer, in the folder model."""
    shutil.copytree(REFERENCE / "llama", "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "frozen/artifacts/dynamic" / file, "model")


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


@pytest.mark.parametrize("quant", ["none", "a16w8", "a16w4", "a8w8"])
def test_an_export_computes_what_the_online_backend_does(run: Run, quant: str) -> None:
    run(*EXPORT, f"quant={quant}")
    (folder,) = Path("outputs").glob("tiny_llama_packed*")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["layout"], manifest["model_type"]) == ("packed", "PACKED")
    assert manifest["operators"]["quant"] == quant
    assert not list(folder.glob("*.yaml"))  # for no tool of MindFormers
    offline = run("backend=mslite", f"infer.model_dir={folder}", *PREDICT)
    assert offline["engine"].startswith("native, ")
    assert tokens(offline) == tokens(run("model=tiny_llama", f"quant={quant}", *PREDICT))


@pytest.mark.parametrize(("quant", "says"), [("none", False), ("a16w8", True)])
def test_matrices_of_16_bits_need_no_note(
    run: Run, capsys: pytest.CaptureFixture[str], quant: str, says: bool
) -> None:
    run(*EXPORT, f"quant={quant}", "model.model_config.compute_dtype=bfloat16")
    assert ("compute_dtype=bfloat16: quantized weights" in capsys.readouterr().err) == says


def test_bfloat16_is_what_inputs_are_rounded_to(run: Run) -> None:
    short = "model.model_config.compute_dtype=bfloat16"
    run(*EXPORT, short)
    folder = Path(f"{FOLDER}_bfloat16")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["operators"]["bfloat16_input"]
    offline = run("backend=mslite", f"infer.model_dir={folder}", *PREDICT)
    online = run("model=tiny_llama", *PREDICT, short)
    assert tokens(offline) == tokens(online)


def test_a_run_chooses_what_graphs_fix(run: Run) -> None:
    """Rows, positions, beams and the type of the cache."""
    run(*EXPORT, "seed=3")  # of the random weights too
    for settings in (
        ["num_beams=3"],
        ["do_sample=true"],
        ["kv_cache=int8"],
        ["max_new_tokens=100"],
        ["prompt_logprobs=2", "backend=mslite", "engine=native"],
    ):
        offline = run(*GIVEN, "seed=3", *settings)
        assert tokens(offline) == tokens(run("model=tiny_llama", *PREDICT, "seed=3", *settings[:1]))


def test_one_is_made_in_the_cache_where_none_is_named(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = ["model=tiny_llama", "backend=mslite", "engine=native"]
    run(*cached, *PREDICT)
    assert "exporting it first" in capsys.readouterr().err
    result = run(*cached, "predict_data=other", "max_new_tokens=40", "kv_cache=fp16")
    assert "exporting it first" not in capsys.readouterr().err  # of any sizes
    assert result["engine"].startswith("native, ")


WITHOUT = """
import sys
{code}
found = [name for name in sys.modules if name.partition(".")[0] == "mindspore"]
print(found)
"""
MAIN = "from lite_runner.app import main; assert main({line!r}) == 0"
CELL = """
import io
from lite_runner.bench import cell, cell_job
from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve
config, _ = resolve(parse({line!r}, heads()))
(job,) = cell_job.jobs_of(config.bench, config)
assert "native" in cell.answer(job.to_json())["measured"]["engine"]
"""
AUTO = """
from lite_runner import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained("model", backend="auto")
tokenizer = AutoTokenizer.from_pretrained("model")
model.generate(tokenizer(["ab", "c"])["input_ids"], max_new_tokens=3)
"""
PIPELINE = """
from lite_runner import pipeline
for how in ({{"backend": "mslite", "engine": "native"}}, {{"backend": "auto"}}):
    made = pipeline("text_generation", "model", max_new_tokens=3, **how)
    made(["ab", "c"])
    assert made.model._loaded._engine._backend.info.engine.startswith("native, ")
made = pipeline("text_generation", {folder!r}, backend="mslite", max_new_tokens=3)
made("ab")
"""
SCORED = ["run_mode=eval", "eval_data=text.txt"]
MEASURED = ["run_mode=bench", "bench.batch=1", "bench.prompt=8", "bench.new=2"]


@pytest.mark.parametrize(
    "code",
    [
        MAIN.format(line=GIVEN),
        MAIN.format(line=[*GIVEN[:3], *SCORED]),
        MAIN.format(line=["load_checkpoint=model", "backend=auto", *SCORED]),
        CELL.format(line=[*GIVEN[:3], *MEASURED]),
        AUTO,
        PIPELINE.format(folder=str(FOLDER)),
    ],
    ids=["predict", "eval", "eval auto", "bench", "AutoModel", "pipeline"],
)
def test_mindspore_is_not_imported(run: Run, code: str) -> None:
    run(*EXPORT)
    write_model()
    Path("text.txt").write_text("a text to score", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(code=code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_it_scores_texts_as_the_online_backend_does(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model()
    Path("text.txt").write_text("a text to score, of several windows", encoding="utf-8")
    score = ["load_checkpoint=model", *SCORED, "eval_window=16", "eval_stride=8"]
    online = run(*score)
    native = run(*score, "backend=auto")
    assert (online["backend"], native["backend"]) == ("ms", "mslite")
    assert native["engine"].startswith("native, ")
    found = native["evaluation"]["perplexity"]
    assert found == pytest.approx(online["evaluation"]["perplexity"], rel=1e-6)
    run("run_mode=export", "load_checkpoint=model", "export.layout=dynamic", "export_output=graphs")
    refused(["backend=mslite", "infer.model_dir=graphs", *SCORED], 2)
    assert "the logits of the last token alone" in capsys.readouterr().err


def test_what_only_graphs_have_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for setting in (
        "export.target=Ascend",
        "export.weight_fp16=true",
        "infer.model_type=mindir",
        "infer.enc_key=0123456789abcdef",
        "model.model_config.is_sample_acceleration=true",
        "parallel=tp2",
    ):
        refused([*EXPORT, setting], 2)
        message = capsys.readouterr().err
        assert "is of MindIR graphs; engine=native" in message, message
    refused([*EXPORT, "context.kernels=false"], 2)
    assert "needs context.kernels=true" in capsys.readouterr().err
    run(*EXPORT)
    refused([*GIVEN, "engine=graph-cell"], 2)
    assert "engine=graph-cell does not run the layout packed" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0.02, 0.4, 0.9])
def test_a_changed_byte_is_found(
    run: Run, capsys: pytest.CaptureFixture[str], place: float
) -> None:
    run(*EXPORT)
    (path,) = FOLDER.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    refused([*GIVEN], 4)
    assert "another file than the one exported" in capsys.readouterr().err


def test_auto_packs_a_checkpoint_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_model()
    auto = ["load_checkpoint=model", "backend=auto", "predict_data=ab", "max_new_tokens=4"]
    first = run(*auto)
    said = capsys.readouterr().err
    assert "exporting it first (backend=ms does without)" in said
    assert "is in the cache from now on" in said
    assert "verify" not in said  # which packs it once more
    second = run(*auto)
    assert "exporting" not in capsys.readouterr().err
    online = run(*auto, "backend=ms")
    assert tokens(first) == tokens(second) == tokens(online)
    assert (second["backend"], online["backend"]) == ("mslite", "ms")
    assert run(*auto, "context.kernels=false")["backend"] == "ms"
