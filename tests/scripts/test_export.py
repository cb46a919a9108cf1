"""scripts/export.py with MindFormers' flags, and run_infer_main.py on its output."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.model_dir import yamls_in
from lite_runner.mindir.manifest import read_manifest
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from tests.paths import ROOT
from tests.scripts.running import run_program, run_script

YAML = """
run_mode: predict
use_parallel: True
trainer: {model_name: tiny_llama}
model:
  model_config: {type: LlamaConfig, num_layers: 1, seq_length: 128, batch_size: 1, use_past: True}
  arch: {type: LlamaForCausalLM}
infer:
  prefill_model_path: "test_model_dir/x_7.1b_prefill"
  increment_model_path: "test_model_dir/x_7.1b_inc.mindir"
  infer_seq_length: 64
  model_type: mindir
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder with one yaml file and one checkpoint, of weights that no name has."""
    folder = tmp_path / "test_model_dir"
    folder.mkdir()
    (folder / "test.yaml").write_text(YAML)
    words = ["model=tiny_llama", "model.model_config.num_layers=1", "predict_data=x"]
    config, _ = resolve(parse(words, heads()))
    model = config.model_config()
    assert model is not None
    write_ckpt(folder / "test.ckpt", random_checkpoint(model, seed=7))
    return folder


def test_a_folder_is_exported_and_asked(tmp_path: Path, model_dir: Path) -> None:
    """As MindFormers' documents have it: the graphs come to lie beside the yaml, an export is
    repeated, and the pair is asked by its family's name with a GE file of no sections."""
    for batch in ("2", "1"):
        done = run_script(
            tmp_path, "export.py", "--model_dir", "test_model_dir", "--batch_size", batch
        )
        assert done.returncode == 0, done.stderr
        manifest = read_manifest(model_dir)
        sizes = (manifest.layout, manifest.batch_size, manifest.seq_length)
        assert sizes == ("static_pair", int(batch), 64)
    assert manifest.source == "test_model_dir" and manifest.model.seq_length == 128
    assert {graph.file for graph in manifest.graphs.values()} == {
        *("x_7.1b_prefill.mindir", "x_7.1b_inc.mindir")
    }
    assert [path.name for path in yamls_in(model_dir)] == ["test.yaml"]
    assert (model_dir / "test.yaml").read_text() == YAML
    (tmp_path / "context.cfg").write_text("provider=ge\n\n[ge_session_options]\na=1\n")
    flags = [
        *("--device_id", "7", "--model_name", "llama", "--config_path", "context.cfg"),
        *("--prefill_model_path", "test_model_dir/x_7.1b_prefill_graph.mindir"),
        *("--increment_model_path", "test_model_dir/x_7.1b_inc_graph.mindir"),
        *("--is_sample_acceleration", "False", "--seq_length", "64"),
    ]
    asked = run_program(tmp_path, "run_infer_main.py", *flags, "--predict_data", "what color")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("one token takes ") >= 10 and "['what color" in asked.stdout
    assert "x_7.1b_inc_graph.mindir: no such file; using x_7.1b_inc.mindir" in asked.stderr
    assert "context.cfg: provider=ge before the first [section]" in asked.stderr
    assert "context.cfg: for GE on Ascend; this runs in graph-cell on CPU" in asked.stderr


@pytest.mark.parametrize(
    ("flags", "code", "error"),
    [
        (["--config_path", "missing.yaml"], 2, "missing.yaml: No such file"),
        (["--model_dir", "missing"], 4, "missing: no such folder"),
        (["--model_dir", "."], 4, "no yaml file of the model"),
        (["--model_dir", "two"], 4, "got 2 yaml files (a.yaml, b.yaml)"),
        (["--config_path", "two/a.yaml", "--batch_size", "0"], 2, "predict_batch_size: got 0"),
        (["--config_path", "two/a.yaml", "--model_type", "onnx"], 2, "invalid choice: 'onnx'"),
        (["--config_path", "two/a.yaml", "--model_dir", "."], 2, "not allowed with"),
        ([], 2, "one of the arguments --config_path --model_dir is required"),
    ],
)
def test_exports_that_are_refused(tmp_path: Path, flags: list[str], code: int, error: str) -> None:
    (tmp_path / "two").mkdir()
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / "two" / name).write_text(YAML)
    done = run_script(tmp_path, "export.py", *flags)
    assert (done.returncode, done.stdout) == (code, "") and error in done.stderr, done.stderr


def test_a_yaml_for_ascend_is_exported_here_on_request(tmp_path: Path) -> None:
    """The remedies of the error work: the flag, the key, and the flag before the script."""
    (tmp_path / "a.yaml").write_text(f"{YAML}context: {{mode: 0, device_target: Ascend}}\n")
    refused = run_program(tmp_path, "export.py", "--config_path", "a.yaml")
    assert refused.returncode == 3, refused.stderr
    assert "context.device_target=CPU (or --device_target CPU)" in refused.stderr
    script = runpy.run_path(str(ROOT / "scripts/export.py"))
    for given in (["--device_target", "CPU"], ["context.device_target=CPU"]):
        flags = script["parser"]().parse_args(["--config_path", "a.yaml", *given])
        config, _ = resolve(parse(script["command_line"](flags), heads()))
        assert config.context.device_target == "CPU"
    words = ["--device_target", "CPU", "mindformers/tools/export.py", "--config_path", "a.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "lite_runner.mindformers", *words],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test_model_dir/x_7.1b_inc.mindir").is_file()
