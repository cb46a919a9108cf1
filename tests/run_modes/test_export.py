"""Export, and predicting offline, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.backends.lite.export import opening, writer
from lite_runner.backends.lite.export.job import spec_of
from lite_runner.config.argv import parse
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing import parameter_count
from tests.paths import REFERENCE
from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
LAYOUTS = {"resizable": "lite-worker", "static_pair": "graph-cell"}
# Of one layer: each that is compiled takes half a second.
LLAMA, BLOOM, GPT2, QWEN2 = (
    (f"model=tiny_{name}", "model.model_config.num_layers=1")
    for name in ("llama", "bloom", "gpt2", "qwen2")
)
PREDICT = ["predict_data=['some words','中文']", "max_new_tokens=6", "eos_token_id=[]"]


@pytest.fixture(autouse=True)
def lite(monkeypatch: pytest.MonkeyPatch, lite_python: Path) -> None:
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))


@pytest.fixture
def verified() -> None:
    """Requested by tests whose exports are verified."""


@pytest.fixture(autouse=True)
def others(request: pytest.FixtureRequest) -> None:
    """The others do without."""
    if "verified" not in request.fixturenames:
        request.getfixturevalue("unverified")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of tiny_gpt2: a pair for a row of 32 positions. It is not to be changed."""
    base = tmp_path_factory.mktemp("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        patch.setattr(writer, "verify", lambda *_, **__: None)
        export = ["run_mode=export", *GPT2, "export.layout=static_pair"]
        assert main([*export, "infer.infer_seq_length=32"]) == 0
    return base / "outputs/tiny_gpt2_static_pair_s32"


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


@pytest.mark.parametrize(
    ("model", "layout"),
    # What is exported to a folder, is kept, or is found by backend=auto: below.
    [(BLOOM, "resizable"), (LLAMA, "static_pair")],
    ids=["bloom-resizable", "llama-static_pair"],
)
def test_offline_tokens_equal_the_online_ones(
    run: Run, model: tuple[str, ...], layout: str
) -> None:
    online = run(*model, *PREDICT)
    offline = run(*model, *PREDICT, "backend=mslite", f"export.layout={layout}")
    assert offline["engine"] == LAYOUTS[layout]
    assert tokens(offline) == tokens(online)


def test_weights_of_16_bits_offline(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported in float32 with rounded weights, in an artifact of its own."""
    half = [*LLAMA, *PREDICT, "model.model_config.compute_dtype=bfloat16"]
    online = run(*half)
    capsys.readouterr()
    offline = run(*half, "backend=mslite")
    stderr = capsys.readouterr().err
    assert "exporting it first" in stderr
    assert stderr.count("compute in float32 on a CPU, with weights rounded to bfloat16") == 1
    assert tokens(offline) == tokens(online)


def test_the_exported_model_is_kept_and_used_again(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*LLAMA, "backend=mslite", *PREDICT]
    online = run(*LLAMA, *PREDICT)
    first = run(*command)
    assert first["engine"] == "lite-worker"
    assert "exporting it first" in capsys.readouterr().err
    second = run(*command)
    assert "exporting it first" not in capsys.readouterr().err
    assert tokens(second) == tokens(first) == tokens(online)


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_is_a_folder_that_predict_takes(
    run: Run, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [*QWEN2, f"export.layout={layout}", "predict_batch_size=2"]
    run("run_mode=export", *model)
    rows = "" if layout == "resizable" else "_b2"
    folder = Path(f"outputs/tiny_qwen2_{layout}{rows}")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["layout"] == layout and manifest["model_name"] == "tiny_qwen2"
    beside = {"manifest.json", "tiny_qwen2.yaml"}
    assert {path.name for path in folder.iterdir()} == {*beside, *manifest["files"]}
    assert all(graph["file"].endswith(".mindir") for graph in manifest["graphs"].values())
    online = run(*QWEN2, *PREDICT)
    for model in ([*QWEN2], ["--config", str(folder / "tiny_qwen2.yaml")]):
        offline = run(*model, "backend=mslite", f"infer.model_dir={folder}", *PREDICT)
        assert offline["engine"] == LAYOUTS[layout]
        assert tokens(offline) == tokens(online)
    capsys.readouterr()  # a server has the rows of the graphs, and their positions
    assert main(["run_mode=serve", f"infer.model_dir={folder}", "dry_run=true"]) == 0
    served = f" for {2 if rows else 8} x {manifest['seq_length']} tokens"
    assert served in capsys.readouterr().out


EXPORTS = """
import sys
from lite_runner.app import main
from lite_runner.backends.lite.export import writer

writer.verify = lambda *_, **__: None
for form in ("export.layout=static_pair", "infer.model_type=mindir_lite"):
    export = ["run_mode=export", "model=tiny_llama", "model.model_config.num_layers=1", form]
    assert main([*export, f"export_output={sys.argv[1]}/{form.partition('=')[2]}"]) == 0
"""


@pytest.mark.usefixtures("run")
def test_the_same_export_has_the_same_bytes_in_every_process() -> None:
    """Whatever the order of strings in sets: names, primitives and the manifest's digests."""
    written = []
    for seed in "12":
        command = [sys.executable, "-c", EXPORTS, f"of_{seed}"]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        files = sorted(Path(f"of_{seed}").glob("*/*"))
        written.append({path.relative_to(f"of_{seed}"): path.read_bytes() for path in files})
    assert {path.parts[0] for path in written[0]} == {"static_pair", "mindir_lite"}
    assert written[0] == written[1]


def test_an_export_in_the_cache_is_found_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the times of its checkpoint, nor by where that is; and by the code that wrote it."""
    folders = []
    for name in ("first", "second", "changed"):
        folder = tmp_path / name / "llama"
        shutil.copytree(REFERENCE / "llama", folder)  # with times of its own
        if name == "changed":
            weights = folder / "model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        given = ["model=auto", f"load_checkpoint={folder}", "run_mode=export"]
        config, _ = resolve(parse(given, heads()))
        files = locate(config.source)
        spec = spec_of(config.settings, files, 1, 64)
        folders.append(opening.folder_in_cache("x", files, spec))
    assert folders[0] == folders[1] != folders[2]
    monkeypatch.setattr(opening, "code_digest", lambda: "of other code")
    assert opening.folder_in_cache("x", files, spec) not in folders


@pytest.mark.usefixtures("verified")
def test_converted_for_lite_in_a_folder_of_any_name(run: Run) -> None:
    folder = Path("my models+模型/x")
    export = ["run_mode=export", *LLAMA, "infer.model_type=mindir_lite"]
    run(*export, f"export_output={folder}")
    assert [path.suffix for path in folder.iterdir() if path.suffix in (".ms", ".mindir")] == [
        ".ms"
    ]
    given = [*LLAMA, "backend=mslite", f"infer.model_dir={folder}"]
    assert tokens(run(*given, *PREDICT)) == tokens(run(*LLAMA, *PREDICT))


def test_an_export_keeps_its_length(
    run: Run, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*GPT2, "backend=mslite", f"infer.model_dir={gpt2}", "predict_data=a", PREDICT[1]]
    run(*given)
    assert "was exported; tiny_gpt2 has" not in capsys.readouterr().err
    run(*given, "model.model_config.seq_length=100")
    note = f"seq_length 256, as {gpt2} was exported; tiny_gpt2 has 100"
    assert note in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_a_changed_file_ends_in_4(
    tmp_path: Path, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(gpt2, tmp_path / "x"))
    graph = next(iter(folder.glob("*.mindir")))
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.chmod(0o600)
    graph.write_bytes(content)
    refused([*GPT2, "backend=mslite", f"infer.model_dir={folder}", *PREDICT], 4)
    assert "another file than the one exported" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_another_model_ends_in_4(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused([*BLOOM, "backend=mslite", f"infer.model_dir={gpt2}", *PREDICT], 4)
    assert "an export of tiny_gpt2, another model than tiny_bloom" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_more_than_was_exported_for_ends_in_2(
    gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*GPT2, "backend=mslite", f"infer.model_dir={gpt2}"]
    refused([*given, "predict_data=a", "max_new_tokens=40"], 2)
    assert "made for 32 positions per row" in capsys.readouterr().err
    refused([*given, *PREDICT], 2)
    assert "predict_batch_size=1" in capsys.readouterr().err


def test_an_existing_folder_is_kept(
    run: Run, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ["run_mode=export", *GPT2, "export.layout=resizable"]
    shutil.copytree(gpt2, "outputs/tiny_gpt2_resizable")
    refused(export, 2)
    assert "overwrite=true" in capsys.readouterr().err
    run(*export, "overwrite=true")


@pytest.mark.usefixtures("verified")
def test_a_graph_with_other_results_is_not_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "TOLERANCE", {"float32": -1.0})  # the logits are equal
    refused(["run_mode=export", *GPT2, "export.layout=static_pair"], 4)
    assert "differs in graph-cell" in capsys.readouterr().err
    assert not list(Path("outputs").glob("*tiny_gpt2_static_pair*"))


def test_a_model_too_large_ends_in_3_before_it_is_loaded(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    big = ["model=llama2_70b", "load_checkpoint=random"]
    refused(["run_mode=export", *big], 3)
    message = capsys.readouterr().err
    assert "memory: the run needs 552.6 GB (weights 275.9 GB" in message
    assert "export llama2_70b" not in message


@pytest.mark.usefixtures("verified")
def test_a_graph_that_samples_gives_the_same_tokens(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = "model.model_config.is_sample_acceleration=true"
    run("run_mode=export", *BLOOM, sampled, "predict_batch_size=2")
    folder = Path("outputs/tiny_bloom_static_pair_sampled_b2")
    manifest = json.loads((folder / "manifest.json").read_text())
    outputs = manifest["graphs"]["prefill"]["outputs"]
    assert manifest["sampled"] and [one["name"] for one in outputs] == ["probabilities", "tokens"]
    given = [*BLOOM, "backend=mslite", f"infer.model_dir={folder}"]
    assert tokens(run(*given, *PREDICT)) == tokens(run(*BLOOM, *PREDICT))
    capsys.readouterr()
    for asked in ("do_sample=true", "repetition_penalty=1.1", "num_beams=2", "min_new_tokens=3"):
        refused([*given, *PREDICT, asked], 2)
        message = capsys.readouterr().err
        assert "load tiny_bloom" not in message  # refused before anything is loaded


def test_an_encrypted_export(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "0123456789abcdef")
    export = ["run_mode=export", *GPT2, "predict_batch_size=2"]
    run(*export, "infer.enc_key=0123456789abcdef")
    assert "0123456789abcdef" not in Path("outputs/latest/config.yaml").read_text()
    assert "0123456789abcdef" not in Path("outputs/latest/run.log").read_text()
    folder = Path("outputs/tiny_gpt2_static_pair_encrypted_b2")
    assert json.loads((folder / "manifest.json").read_text())["encrypted"]
    given = [*GPT2, "backend=mslite", f"infer.model_dir={folder}", *PREDICT]
    right = run(*given, "infer.enc_key=env:MY_KEY")
    assert tokens(right) == tokens(run(*GPT2, *PREDICT))
    refused([*given, "infer.enc_key=fedcba9876543210"], 4)
    assert "does not open with this key" in capsys.readouterr().err
    refused(given, 4)
    assert "the model is encrypted" in capsys.readouterr().err


@pytest.mark.usefixtures("verified")
def test_for_ascend_the_pair_is_in_float16(
    run: Run, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("run_mode=export", *GPT2, "export.target=Ascend", "ge=atlas_800t_a2")
    assert "for Ascend, which this machine lacks: the graphs are verified in graph-cell on CPU" in (
        capsys.readouterr().err
    )
    folder = Path("outputs/tiny_gpt2_static_pair_ascend")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["target"], manifest["precision"]) == ("Ascend", "float16")
    names = {path.name for path in folder.iterdir()}
    assert {"tiny_gpt2_prefill_graph.mindir", "tiny_gpt2_inc_graph.mindir"} < names
    assert "ge.exec.formatMode=1" in (folder / "config.ini").read_text().splitlines()
    # Where no GE compiles anything its options are a note, as infer.ge_config_path is.
    given = [*GPT2, "backend=mslite", f"infer.model_dir={gpt2}"]
    run(*given, "ge=atlas_800", "predict_data=a", "max_new_tokens=3")
    assert "config.ini: for GE on Ascend; this runs in " in capsys.readouterr().err


def test_an_export_to_two_paths(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("models")
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    paths = [
        "infer.prefill_model_path=models/bloom_prefill.mindir",
        "infer.increment_model_path=models/bloom_inc.mindir",
    ]
    export = ["run_mode=export", *BLOOM, "predict_batch_size=2", *paths]
    (folder / "bloom_inc.mindir").write_text("of another export")
    refused(export, 2)
    assert "exists already" in capsys.readouterr().err
    run(*export, "overwrite=true")
    names = {path.name for path in folder.iterdir()}
    assert {"bloom_prefill.mindir", "bloom_inc.mindir", "manifest.json", "mine.txt"} < names
    assert (folder / "mine.txt").read_text() == "kept"
    given = [*BLOOM, "backend=mslite", *paths, *PREDICT]
    assert tokens(run(*given)) == tokens(run(*BLOOM, *PREDICT))
    refused(export, 2)
    assert "exists already" in capsys.readouterr().err


def test_a_pair_in_float16_holds_it_once(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files of half the size, and above MindSpore's 1 GB (here 0) in one for both graphs."""
    monkeypatch.setattr("mindspore.train.serialization.TOTAL_SAVE", 0)
    half = "model.model_config.compute_dtype=float16"
    export = ["run_mode=export", *GPT2, "export.layout=static_pair"]
    export += ["infer.infer_seq_length=32", "predict_batch_size=2"]
    run(*export, half, "export_output=half")
    assert "wrote half: static_pair, 0 MB" in capsys.readouterr().err
    first, second = (
        Path("half", f"tiny_gpt2_{graph}_variables", "data_0").stat()
        for graph in ("prefill", "inc")
    )
    model = resolve(parse([*GPT2, "run_mode=export"], heads()))[0].model_config()
    assert model is not None
    assert first.st_ino == second.st_ino and first.st_size < 0.6 * 4 * parameter_count(model)
    offline = run("backend=mslite", "infer.model_dir=half", *PREDICT)
    assert tokens(offline) == tokens(run(*GPT2, half, *PREDICT))


def test_a_full_graph_alone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a cache and at the first path only, with its manifest and with the yaml alone."""
    path = "infer.prefill_model_path=models/full_prefill.mindir"
    export = ["run_mode=export", *LLAMA, "predict_batch_size=2"]
    run(*export, "infer.infer_seq_length=48", path)
    assert "infer.increment_model_path= writes a pair" in capsys.readouterr().err
    online = tokens(run(*LLAMA, *PREDICT))
    offline = run("backend=mslite", path, *PREDICT)
    assert offline["engine"] == "graph-cell"
    assert tokens(offline) == online
    Path("models/manifest.json").unlink()
    yaml = ["--config", "models/tiny_llama.yaml"]
    assert "use_past: false" in Path(yaml[1]).read_text()
    assert tokens(run(*yaml, "backend=mslite", path, *PREDICT)) == online
    folder = [*yaml, "backend=mslite", "infer.model_dir=models"]
    assert tokens(run(*folder, *PREDICT)) == online
    refused([*yaml, "backend=mslite", path, *PREDICT, "engine=lite-worker"], 2)
    assert "keeps no cache in a graph between runs" in capsys.readouterr().err


def test_a_full_graph_on_demand_and_sampled(
    run: Run, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    past = [*GPT2, "model.model_config.use_past=false", "backend=mslite", *PREDICT]
    sampled = "model.model_config.is_sample_acceleration=true"
    assert tokens(run(*past, sampled)) == tokens(run(*GPT2, *PREDICT))
    refused([*past, f"infer.model_dir={gpt2}"], 2)
    assert f"{gpt2.name}: exported with a cache, got model.model_config.use_past=false" in (
        capsys.readouterr().err
    )


def test_integers_are_not_exported(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is asked of the export, and whoever rounds; settings in the error can be typed."""
    model = "model=tiny_llama"
    run("run_mode=quantize", model, "quant=a16w8", "quantize_output=q")
    capsys.readouterr()
    for words in (
        ["run_mode=export", "quant=a16w8"],
        ["run_mode=export", "quant=a8w8", "export.layout=resizable"],
        ["run_mode=export", "quant=a16w4", "infer.prefill_model_path=a.mindir"],
        ["run_mode=export", "load_checkpoint=q"],
        ["backend=mslite", "quant=a16w8", *PREDICT],
        ["engine=graph-cell", "load_checkpoint=q", *PREDICT],
    ):
        refused([model, *words], 2)
        stderr = capsys.readouterr().err
        assert "graphs compute with floats" in stderr and "backend=native" in stderr, words
        assert "load tiny_llama" not in stderr
    run(model, "load_checkpoint=q", "backend=native", *PREDICT)
