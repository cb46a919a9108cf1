"""Exporting quantized models, and predicting with them, from the command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner import native
from lite_runner.native.versions import FORMAT, UNREADABLE
from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
PREDICT = ["predict_data=['some words','中文']", "max_new_tokens=6", "eos_token_id=[]"]
FOLDER = Path("outputs/tiny_llama_dynamic_a16w8_b2")
GIVEN = ["backend=mslite", f"infer.model_dir={FOLDER}", *PREDICT]
EXPORT = ["run_mode=export", "model=tiny_llama", "quant=a16w8", "predict_batch_size=2"]


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


def test_an_export_is_a_folder_that_predict_takes(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*EXPORT, "kv_cache=int8", "infer.infer_seq_length=64")
    folder = Path("outputs/tiny_llama_dynamic_a16w8_kv-int8_b2_s64")
    given = ["backend=mslite", f"infer.model_dir={folder}", *PREDICT]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["layout"] == "dynamic"
    assert (manifest["batch_size"], manifest["seq_length"]) == (2, 64)
    found = manifest["operators"]
    assert (found["quant"], found["kv_cache"], found["capacity"]) == ("a16w8", "int8", 512)
    assert "tiny_llama_variables/data_0" in manifest["files"]
    offline = run(*given)
    assert offline["engine"] == "graph-cell"
    assert tokens(offline) == tokens(run("model=tiny_llama", "quant=a16w8", *PREDICT))
    auto = run("backend=auto", f"infer.model_dir={folder}", "quant=a16w8", *PREDICT)
    assert (auto["backend"], tokens(auto)) == ("mslite", tokens(offline))

    capsys.readouterr()
    faults = {
        "engine=lite": "engine=lite does not run the layout dynamic",
        "engine=lite-worker": "engine=lite-worker does not run the layout dynamic",
        "context.kernels=false": "a graph of this project's own operators",
        "kv_cache=fp16": "exported with kv_cache=int8, got kv_cache=fp16",
        "num_beams=2": "4 are asked for",
        "max_new_tokens=90": "made for 64 positions a row",
    }
    for setting, message in faults.items():
        refused([*given, setting], 2)
        assert message in capsys.readouterr().err
    refused([*given, "quant=a8w8"], 4)
    assert "exported with quant=a16w8, this run asks for quant=a8w8" in capsys.readouterr().err


def test_one_in_the_cache_is_of_its_quantization(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = ["model=tiny_llama", "backend=mslite", *PREDICT]
    for quant in ("quant=a16w8", "quant=a8w8"):
        run(*cached, quant)
        assert "exporting it first" in capsys.readouterr().err
    run(*cached, "quant=a8w8")
    assert "exporting it first" not in capsys.readouterr().err


def test_operators_of_another_format_end_in_4(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(*EXPORT)
    path = FOLDER / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert manifest["operators"]["format"] == 1  # what is no newer is read by older ones too
    del manifest["checksum"]
    manifest["operators"]["format"] = FORMAT + 1
    path.write_text(json.dumps(manifest), encoding="utf-8")
    refused(GIVEN, 4)
    error = capsys.readouterr().err
    assert (
        f"packed in format {FORMAT + 1}, but the operators here read formats 1 to {FORMAT}" in error
    )
    assert "export the model again" in error
    manifest["operators"]["format"] = UNREADABLE[0]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    refused(GIVEN, 4)
    assert f"formats 1 to {FORMAT} (not {UNREADABLE[0]})" in capsys.readouterr().err
    manifest["operators"] |= {"format": FORMAT, "capacity": 1 << 40}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    refused(GIVEN, 4)
    assert "not a manifest of this version" in capsys.readouterr().err


def test_a_damaged_layer_ends_in_4(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(*EXPORT)
    data, path = FOLDER / "tiny_llama_variables/data_0", FOLDER / "manifest.json"
    damaged = bytearray(data.read_bytes())
    damaged[64:72] = (1 << 40).to_bytes(8, "little")  # the first word of the first layer
    data.write_bytes(damaged)
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["checksum"]
    manifest["files"]["tiny_llama_variables/data_0"] = hashlib.sha256(damaged).hexdigest()
    path.write_text(json.dumps(manifest), encoding="utf-8")
    refused(GIVEN, 4)
    error = capsys.readouterr().err
    assert f"tiny_llama_graph.mindir: layer0: hidden: got {1 << 40}, expected 64" in error
    assert "export the model again" in error


def test_without_operators_it_ends_in_3(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*EXPORT)
    monkeypatch.setattr(native, "LIBRARY", Path("operators.so").absolute())
    for command in (GIVEN, [*EXPORT, "overwrite=true"]):
        capsys.readouterr()
        refused(command, 3)
        error = capsys.readouterr().err
        assert "this project's own operators, which were not built" in error
        assert "install a C++ compiler" in error


def test_the_graph_without_its_manifest_ends_in_4(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*EXPORT)
    (FOLDER / "manifest.json").unlink()
    refused([*GIVEN, "model=tiny_llama"], 4)
    assert "unknown layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting",
    [
        "export.layout=resizable",
        "export.layout=static_pair",
        "engine=lite-worker",
        "export.target=Ascend",
        "export.weight_fp16=true",
        "infer.model_type=mindir_lite",
        "infer.enc_key=0123456789abcdef",
        "model.model_config.is_sample_acceleration=true",
        "infer.prefill_model_path=a.mindir",
    ],
)
def test_what_an_export_of_integers_cannot_be(
    run: Run, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([*EXPORT, setting], 2)
    key = setting if setting.startswith(("export", "engine")) else setting.partition("=")[0]
    assert f"quant=a16w8 is not available with {key}" in capsys.readouterr().err


def test_a_rounded_cache_needs_our_operators(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["run_mode=export", "model=tiny_llama", "kv_cache=int8"], 2)
    assert "kv_cache=int8 of an export needs quantized weights" in capsys.readouterr().err
