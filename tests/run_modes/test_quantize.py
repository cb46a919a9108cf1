"""run_mode=quantize from the command line, and its output run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner import AutoModel
from lite_runner.app import main
from lite_runner.architectures import parameters
from lite_runner.config.argv import parse
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from tests.models import model_named
from tests.references import REFERENCE
from tests.refusals import refused
from tests.tiny_gguf import write_tiny_gguf

QUANTIZE = ["verbosity=0", "run_mode=quantize"]
TARGET = ["quantize_output=q"]
TINY = ["model=tiny_llama", "load_checkpoint=random"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    return tmp_path


def quantized(*overrides: str, target: str = "q", quant: str = "a16w4") -> list[str]:
    """The files that were written."""
    arguments = [*QUANTIZE, f"quant={quant}", f"quantize_output={target}", *overrides]
    assert main(arguments) == 0
    return sorted(file.name for file in Path(target).iterdir())


def ids(*overrides: str) -> list[int]:
    # Drawn, since the likeliest token of a tiny model may be the same whatever its weights.
    drawn = ["do_sample=true", "temperature=2", "seed=0", "max_new_tokens=12"]
    arguments = ["verbosity=0", "predict_data=hi", *drawn, *overrides]
    assert main(arguments) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    found: list[int] = result["results"][0]["token_ids"]
    return found


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("tiny_llama", "backend=native"),
        ("tiny_bloom", "backend=ms"),  # floats, whatever the model: one is enough
    ],
)
def test_a_written_checkpoint_runs_as_one_rounded_while_loading(
    model: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one_layer = [f"model={model}", "model.model_config.num_layers=1"]  # to compile
    source = [*one_layer, "load_checkpoint=random"]
    files = quantized(*source)
    assert files == ["config.json", "model.safetensors", "quantization.json"]
    expected = ids(*source, "quant=a16w4", backend)
    capsys.readouterr()
    assert ids(*one_layer, "load_checkpoint=q", "verbosity=1", backend) == expected
    stderr = capsys.readouterr().err
    assert "matrices as the checkpoint holds them" in stderr
    assert ("fall back to dequantized weights" in stderr) == (backend == "backend=ms")
    # Converted, it is a plain checkpoint of those floats.
    convert = ["run_mode=convert", "convert_output=f.safetensors", "load_checkpoint=q"]
    assert main(["verbosity=0", *one_layer, *convert]) == 0
    sizes = model_config_of(Path("q"))
    assert sizes is not None
    floats = open_checkpoint(Path("f.safetensors"), sizes)
    for name, one in open_checkpoint(Path("q"), sizes).items():
        assert floats[name].integers is None
        np.testing.assert_array_equal(floats[name].read(), one.read())


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    quantized(*TINY, "verbosity=1", quant="a16w8")
    stderr = capsys.readouterr().err
    size = Path("q/model.safetensors").stat().st_size
    assert "quant=a16w8:" in stderr and "rounded as they are read" in stderr
    assert "wrote q: " in stderr and "as float32, 3." in stderr
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    assert result["run_mode"] == "quantize" and 0 < size < 300_000


def test_a_folder_of_its_own(write_tiny_llama: Callable[..., Path]) -> None:
    """model=auto knows the sizes; what lies beside the source comes along."""
    source = write_tiny_llama("source")
    (source / "tokenizer_config.json").write_text("{}")
    files = quantized("model=auto", f"load_checkpoint={source}", quant="a8w8")
    assert "tokenizer_config.json" in files
    config, _ = resolve(parse(["model=auto", "load_checkpoint=q", "predict_data=x"], heads()))
    found = locate(config.source)
    assert found.quantization.quant == "a8w8"
    assert found.model == model_named("tiny_llama")


def fault(capsys: pytest.CaptureFixture[str], *overrides: str, code: int = 2) -> str:
    refused(["verbosity=0", *overrides], code)
    return capsys.readouterr().err


def test_contradictory_settings_are_refused_before_loading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantized(*TINY)
    run = ["model=tiny_llama", "load_checkpoint=q", "predict_data=hi"]
    for asked in ("quant=a16w8", "quant=none", "quant=a8w8"):
        error = fault(capsys, *run, asked, code=4)
        assert "q: quantized as a16w4 quant_group=32, this run asks for quant=" in error
        assert "load_checkpoint=random" in error
    error = fault(capsys, *run, "quant=a16w4", "quant_group=64", code=4)
    assert "this run asks for quant=a16w4 quant_group=64" in error
    assert ids("model=tiny_llama", "load_checkpoint=q", "quant=a16w4")
    for asked in ("engine=lite-worker", "model.model_config.use_past=false"):
        error = fault(capsys, *run, asked)
        where = "backend=mslite" if asked.startswith("engine") else asked
        assert f"q: quant=a16w4 quant_group=32 is not available with {where}" in error


def test_a_text_to_calibrate_on_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    line = [*QUANTIZE, *TINY, "quant=a16w4", "quantize_output=q", "quantize.method=gptq"]
    for name in ("nowhere.txt", "nowhere.gguf"):
        assert f"quantize.data: no file {name}" in fault(capsys, *line, f"quantize.data={name}")


def test_weights_of_8_bits_serve_both_settings() -> None:
    quantized(*TINY, quant="a16w8")
    for quant in ("quant=a16w8", "quant=a8w8"):
        found = ids("model=tiny_llama", "load_checkpoint=q", quant)
        assert found == ids(*TINY, quant)


def test_existing_files_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    quantized(*TINY)
    before = Path("q/model.safetensors").read_bytes()
    again = [*QUANTIZE, *TINY, "quant=a16w8", "quantize_output=q"]
    assert "q: exists already" in fault(capsys, *again)
    assert Path("q/model.safetensors").read_bytes() == before
    assert main([*again, "overwrite=true"]) == 0
    assert Path("q/model.safetensors").read_bytes() != before
    # Only what this run mode wrote is replaced, and never what it reads.
    Path("home").mkdir()
    Path("home/thesis").write_text("x")
    home = [*QUANTIZE, *TINY, "quant=a16w8", "quantize_output=home", "overwrite=true"]
    assert "not a quantized checkpoint" in fault(capsys, *home)
    own = [*QUANTIZE, "model=tiny_llama", "quant=a16w8", "overwrite=true", "load_checkpoint=q"]
    assert "q is the source" in fault(capsys, *own, "quantize_output=q")
    Path("q/deep/in").mkdir(parents=True)
    shutil.copytree("q", "copy")
    shutil.move("copy", "q/deep/in")
    own[-1] = "load_checkpoint=q/deep/in/copy"
    assert "q holds the source" in fault(capsys, *own, "quantize_output=q", "dry_run=true")
    assert Path("home/thesis").is_file() and Path("q/model.safetensors").is_file()


def test_nothing_is_left_of_a_disk_that_is_too_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    real = shutil.disk_usage
    small: Callable[[Any], Any] = lambda path: real(path)._replace(free=1000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", small)
    error = fault(capsys, *QUANTIZE, *TINY, "quant=a16w8", "quantize_output=q", code=3)
    assert "the disk is too small" in error
    assert [item.name for item in folder.iterdir() if item.name != "outputs"] == []


def test_a_checkpoint_that_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    cut = ["run_mode=shard", "parallel=tp2", "shard_output=cut"]
    assert main(["verbosity=0", *TINY, *cut]) == 0
    run = ["model=tiny_llama", "load_checkpoint=cut", "auto_trans_ckpt=true", "predict_data=hi"]
    assert "merge it first" in fault(capsys, *run, "quant=a16w8", code=4)
    # What is written is whole, and its receipt reads the source as a whole, too.
    source = ["model=tiny_llama", "load_checkpoint=cut"]
    assert "receipt.json" in quantized(*source, "quantize.format=compressed-tensors")


@pytest.mark.parametrize("kept", ["lm_head", "w2", "wq", "layers.0.", "tok_embeddings"])
def test_modules_to_not_convert_stay_floats(kept: str, tmp_path: Path) -> None:
    """By the part of a name; wq is packed together with wk and wv."""
    quant = {"wq": "a16w4", "layers.0.": "a8w8"}.get(kept, "a16w8")
    setting = f"modules_to_not_convert=[{kept}]"
    quantized(*TINY, setting, quant=quant)
    model = model_named("tiny_llama")
    stored = open_checkpoint(tmp_path / "q", model)
    config, _ = resolve(parse(["predict_data=x", *TINY], heads()))
    floats = locate(config.source).tensors()
    for name, tensor in stored.items():
        whole = kept in name or "norm" in name
        assert (tensor.integers is None) is whole, name
        assert np.array_equal(tensor.float32(), floats[name].float32()) is whole, name
    written = ids("model=tiny_llama", "load_checkpoint=q")
    assert written == ids(*TINY, f"quant={quant}", setting)
    line = ["predict_data=x", "model=tiny_llama", "load_checkpoint=q", f"quant={quant}"]
    refused([*line, "modules_to_not_convert=[w1]"], 4)


def test_a_mindformers_yaml_names_modules_to_not_convert(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = (
        "{quant_method: rtn, weight_dtype: int8, activation_dtype: None,"
        " modules_to_not_convert: ['lm_head', 'w2']}"
    )
    Path("rtn.yaml").write_text(
        "run_mode: predict\ntrainer: {model_name: tiny_llama}\n"
        f"model: {{model_config: {{quantization_config: {section}}}}}\n"
    )
    assert main(["--config", "rtn.yaml", "predict_data=hi", "max_new_tokens=2"]) == 0
    note = "quant=a16w8 modules_to_not_convert=[lm_head,w2]: 13 matrices rounded as they are read"
    assert note in capsys.readouterr().err
    typed = ["modules_to_not_convert=[lm_head]", "predict_data=hi", "max_new_tokens=2"]
    assert main(["--config", "rtn.yaml", *typed]) == 0  # what is typed goes over the file
    assert "quant=a16w8 modules_to_not_convert=[lm_head]: 15 matr" in capsys.readouterr().err
    model = AutoModel.from_pretrained(
        "tiny_llama", quant="a16w8", modules_to_not_convert=["lm_head", "w2"]
    )
    assert model.generate([5, 6], max_new_tokens=2, eos_token_id=[])
    assert note in capsys.readouterr().err


def test_output_larger_than_its_source_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelFiles, "stored_bytes", lambda files: 1000)
    quantized(*TINY, "verbosity=1")
    first = capsys.readouterr().err.splitlines()[0]
    assert "makes the weights larger than in their source" in first and "from 1.0 kB" in first


@pytest.mark.parametrize(
    ("method", "named", "quant", "forms"),
    [
        ("gptq", "GPTQ", "a16w4", ["folder"]),
        ("awq", "AWQ", "a16w4", ["folder", "compressed-tensors"]),
        ("smoothquant", "SmoothQuant", "a8w8", ["folder", "mindformers"]),
    ],
)
def test_a_calibration_leaves_a_receipt(
    method: str, named: str, quant: str, forms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("text.txt")
    text.write_text("The lighthouse of the old harbour. " * 40)
    for form in forms:
        asked = [f"quantize.method={method}", "quantize.tokens=512", "quantize.data=text.txt"]
        asked += [f"quantize.format={form}", "modules_to_not_convert=[layers.1.]", "overwrite=true"]
        files = quantized(*TINY, *asked, "verbosity=1", quant=quant)
        stderr = capsys.readouterr().err
        assert "receipt.json" in files
        assert f"{named}, on text that it did not see: perplexity" in stderr
        receipt = json.loads(Path("q/receipt.json").read_text())
        measured = receipt["held_out"]
        written = "golden_stick.ckpt" if form == "mindformers" else "model.safetensors"
        assert receipt["bytes"] == pytest.approx(Path(f"q/{written}").stat().st_size, rel=0.05)
        assert (receipt["method"], measured["tokens"]) == (method, 127)
        assert 0 < measured["mean_kl"] < 0.5 and 0.5 < measured["top1_agreement"] <= 1
        assert measured["perplexity"] == pytest.approx(measured["source_perplexity"], rel=0.2)
        assert len(ids("model=tiny_llama", "load_checkpoint=q")) == 12
    other = {"a16w4": "a8w8", "a8w8": "a16w4"}[quant]
    error = fault(capsys, *QUANTIZE, *TINY, f"quant={other}", asked[0], "quantize_output=r")
    assert f"quantize.method={method} needs quant={quant}, got quant={other}" in error


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["quant=a16w4"], (4, 8)),
        (["quant=a16w4", "quantize.format=compressed-tensors"], (4, 8)),
        (["quantize.format=Q4_1"], ("Q4_1", "Q8_0")),
    ],
)
def test_mixed_precision(
    asked: list[str], expected: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_gguf(Path("tiny.gguf"))
    Path("text.txt").write_text("The lighthouse of the old harbour. " * 40)
    source = ["model=auto", "load_checkpoint=tiny.gguf", "quantize.data=text.txt"]
    run = [*QUANTIZE, "verbosity=1", *source, *asked, "quantize.tokens=512"]
    run += ["quantize.method=gptq"]
    target = "q.gguf" if "quantize.format=Q4_1" in asked else "q"
    assert main([*run, f"quantize_output={target}", "quantize.bits=6"]) == 0
    stderr = capsys.readouterr().err
    assert "matrices have 8 bits, by the error that 4 cost there" in stderr
    written = ["model=auto", f"load_checkpoint={target}"]
    config, _ = resolve(parse([*written, "predict_data=x"], heads()))
    files = locate(config.source)
    linear = [
        one.name for one in parameters(files.model) if one.is_linear and one.layer is not None
    ]
    tensors = files.whole()
    found = [tensors[name] for name in linear]
    kinds = [
        one.blocks.type_name if one.blocks else one.integers and one.integers.scheme.bits
        for one in found
    ]
    assert set(kinds) == set(expected)
    assert ids(*written)
    error = fault(capsys, *run, "quantize_output=r.gguf", "quantize.bits=9")
    least = 4.5 if "quantize.format=compressed-tensors" in asked else 5.0
    assert f"quantize.bits=9.0: expected {least} (all 4 bits and their scales) to 8.5" in error


def test_a_text_that_is_too_short_to_calibrate_on(
    write_tiny_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["quantize.method=gptq", "quantize.data=text.txt"]
    run = [*QUANTIZE, *TINY, "quant=a16w4", *asked, "quantize_output=q"]
    for times, remedy in ((1, ""), (100, ", or quantize.tokens=720")):
        Path("text.txt").write_text("seaweed. " * times)
        message = fault(capsys, *run, code=4)
        assert f"{9 * times} tokens, expected 20,480 for quantize.tokens=16384" in message
        assert f"-> a longer text{remedy}\n" in message
    assert main([*run, "quantize.tokens=720"]) == 0
    shutil.rmtree("q")
    # It only shows how good the nearest integers are: as many tokens as that takes will do.
    Path("text.txt").write_text("The lighthouse of the old harbour. " * 40)
    asked[0] = "quantize.method=nearest"
    source = f"load_checkpoint={write_tiny_llama('source')}"
    assert "receipt.json" in quantized("model=tiny_llama", source, *asked)


def test_layers_that_take_keys_of_others_are_not_calibrated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["quant=a16w4", "quantize.method=gptq", "quantize_output=q", "dry_run=true"]
    error = fault(capsys, *QUANTIZE, f"model={REFERENCE / 'gemma4_sides'}", *asked)
    assert "take keys of earlier ones" in error and "quantize.method=nearest" in error


def test_memory_of_calibrating_is_checked_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["quant=a16w4", "quantize.method=gptq"]
    run = [*QUANTIZE, *TINY, *TARGET, *asked]
    assert main([*run, "dry_run=true"]) == 0
    assert "free: enough" in capsys.readouterr().out
    monkeypatch.setattr("lite_runner.system.memory.free_memory", lambda: 1 << 20)
    error = fault(capsys, *run, code=3)
    assert "memory: the run needs" in error and not Path("q.partial").exists()
    assert main([*run, "dry_run=true"]) == 0
    assert "NOT enough: the run would be refused" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_gguf_file_is_written(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_gguf(Path("tiny.gguf"))
    source = ["model=auto", "load_checkpoint=tiny.gguf"]
    asked = [f"quantize.format={kind}", "quantize_output=x.gguf"]
    assert main([*QUANTIZE, *source, *asked, "verbosity=1"]) == 0
    stderr = capsys.readouterr().err
    assert "wrote x.gguf: " in stderr
    assert "nearest integers, on text that it did not see, with inputs of 16 bits: perp" in stderr
    measured = json.loads(Path("x.gguf.files/receipt.json").read_text())["held_out"]
    assert 0 <= measured["mean_kl"] < (0.1 if kind == "Q8_0" else 3)
    written = ["model=auto", "load_checkpoint=x.gguf"]
    # The blocks are the integers that loading makes.
    quant = {"Q8_0": [], "Q4_1": ["quant=a16w4"]}[kind]
    if kind == "Q4_1":
        assert ids(*written) == ids(*source, *quant)
    else:
        assert len(ids(*written)) == 12
    assert "x.gguf: exists already" in fault(capsys, *QUANTIZE, *source, *asked)
    again = [*QUANTIZE, *written, f"quantize.format={kind}", "quantize_output=y.gguf"]
    assert main(again) == 0
    assert Path("y.gguf").read_bytes() == Path("x.gguf").read_bytes()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_calibrated_gguf_file_has_a_receipt(method: str) -> None:
    write_tiny_gguf(Path("tiny.gguf"))
    Path("text.txt").write_text("The lighthouse of the old harbour. " * 40)
    asked = [f"quantize.method={method}", "quantize.tokens=512", "quantize.data=text.txt"]
    target = ["quantize.format=Q4_1", "quantize_output=x.gguf"]
    source = ["model=auto", "load_checkpoint=tiny.gguf"]
    assert main([*QUANTIZE, *source, *asked, *target]) == 0
    receipt = json.loads(Path("x.gguf.files/receipt.json").read_text())
    assert receipt["method"] == method and 0 < receipt["held_out"]["mean_kl"] < 2
    assert ids("model=auto", "load_checkpoint=x.gguf")


def test_a_folder_of_compressed_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    source = TINY
    Path("text.txt").write_text("The lighthouse of the old harbour. " * 40)
    asked = ["quantize.method=gptq", "quantize.tokens=512", "quantize.data=text.txt"]
    form = "quantize.format=compressed-tensors"
    files = quantized(*source, *asked, form, "verbosity=1")
    assert {"config.json", "model.safetensors", "receipt.json"} <= set(files)
    stderr = capsys.readouterr().err
    assert "GPTQ, on text that it did not see: perplexity" in stderr and "wrote q: " in stderr
    receipt = json.loads(Path("q/receipt.json").read_text())
    assert receipt["quant"] == "a16w4 quant_group=32" and 0 < receipt["held_out"]["mean_kl"] < 2
    assert len(ids("model=tiny_llama", "load_checkpoint=q")) == 12
    assert "exists already" in fault(capsys, *QUANTIZE, *source, "quant=a16w8", form, *TARGET)
    quantized(*source, form, "overwrite=true", quant="a16w8")
    run = ["model=tiny_llama", "load_checkpoint=q", "predict_data=hi", "max_new_tokens=1"]
    assert main(run) == 0
    assert "weights: compressed-tensors (8 bits) as the file has them" in capsys.readouterr().err
    stderr = fault(capsys, *QUANTIZE, *source, "quant=a8w8", form, *TARGET, "overwrite=true")
    assert "leaves inputs as they are, got quant=a8w8" in stderr


def test_a_checkpoint_of_golden_stick(capsys: pytest.CaptureFixture[str]) -> None:
    form, target = "quantize.format=mindformers", "q"
    assert {"config.json", "golden_stick.ckpt"} <= set(quantized(*TINY, form))
    run = ["model=tiny_llama", f"load_checkpoint={target}", "predict_data=hi", "max_new_tokens=1"]
    assert main(run) == 0
    assert "weights: Golden Stick as the file has them" in capsys.readouterr().err
    quantized(*TINY, form, "overwrite=true", quant="a8w8")
    assert main(run) == 0


def test_unsupported_gguf_output_is_refused_before_loading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = [*QUANTIZE, *TINY, "quantize.format=Q4_K_M"]
    message = fault(capsys, *run, "quant=a16w4", "quantize.method=gptq", "quantize_output=x")
    assert "quantize.format=Q4_K_M writes a file, got x: add .gguf" in message
    assert "quant=a16w4 has no effect: quantize.format=Q4_K_M names the blocks" in message
    assert "quantize.method=gptq rounds to Q4_1, got quantize.format=Q4_K_M" in message
    Path("d.gguf").mkdir()
    message = fault(capsys, *run, "quantize_output=d.gguf", "overwrite=true")
    assert "d.gguf: expected the name of a .gguf file to write" in message
    message = fault(capsys, *run, "quantize_output=x.gguf", code=4)
    assert "a GGUF file cannot hold this tokenizer: it is neither" in message


def test_an_importance_matrix_is_measured_written_and_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tiny_gguf(Path("tiny.gguf"))
    Path("text.txt").write_text("The lighthouse of the old harbour. " * 40)
    run = [*QUANTIZE, "model=auto", "load_checkpoint=tiny.gguf", "quantize.method=imatrix"]
    run += ["quantize.tokens=512", "quantize.format=Q4_0"]
    assert main([*run, "quantize.data=text.txt", "quantize_output=x.gguf"]) == 0
    assert main([*run, "quantize.data=x.gguf.files/imatrix.gguf", "quantize_output=y.gguf"]) == 0
    assert Path("x.gguf").read_bytes() == Path("y.gguf").read_bytes()
    receipt = json.loads(Path("x.gguf.files/receipt.json").read_text())
    assert receipt["method"] == "imatrix" and receipt["bytes"] == Path("x.gguf").stat().st_size
    assert 0 < receipt["held_out"]["mean_kl"] < 4
    Path("broken.dat").write_bytes(b"\x01\x00\x00\x00\x05\x00\x00\x00blk.0")
    message = fault(capsys, *run, "quantize.data=broken.dat", "quantize_output=z.gguf", code=4)
    assert "not an importance matrix of this model: it ends at byte 13" in message
    assert not Path("z.gguf").exists()
