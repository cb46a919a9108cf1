"""InferConfig, InferTask and the folders of exported models."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import InferConfig, InferTask
from lite_runner.api.infer import files_of, infer_config, offline_config
from lite_runner.errors import ArtifactError, ConfigError


def test_tasks() -> None:
    assert InferTask.support_list() == ["text_generation"]
    assert InferTask.check_task_valid("text_generation")
    assert not InferTask.check_task_valid("translation")
    with pytest.raises(ConfigError, match="did you mean text_generation"):
        InferTask.get_infer_task("text_generations", InferConfig())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "onnx"}, "expected one of mindir, mindir_lite"),
        ({"target": "GPU"}, "expected one of auto, Ascend, CPU"),
        ({"device_id": -1}, "device_id: got -1, expected an integer >= 0"),
        ({"infer_seq_length": 0}, ">= 1"),
        ({"infer_seq_length": True}, ">= 1"),
        ({"prefill_model_path": 3}, "expected a text"),
    ],
)
def test_values_that_cannot_be(fields: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        InferConfig(**fields)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    pair = ["x_prefill_graph.mindir", "x_inc_graph.mindir"]
    # Neither the folder's name nor the model's may be taken for a file's.
    folder = touch(tmp_path / "a_prefill_graph", "test.yaml", "config.ini", *pair)
    assert files_of(folder) == {
        "prefill_model_path": str(folder / pair[0]),
        "increment_model_path": str(folder / pair[1]),
        "ge_config_path": str(folder / "config.ini"),
    }
    single = touch(tmp_path / "single", "manifest.json", "y_graph.mindir")
    assert files_of(single) == {"prefill_model_path": str(single / "y_graph.mindir")}
    config, rest = infer_config(folder, {"device_id": 2, "max_length": 9})
    assert (config.device_id, config.ge_config_path) == (2, str(folder / "config.ini"))
    assert rest == {"max_length": 9}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "neither a manifest.json nor a yaml"),
        (("a.yaml", "b.yaml"), "2 yaml files"),
        (("a.yaml",), "got 0 MindIR files"),
        (("a.yaml", "x.mindir", "y.mindir"), "got 2 MindIR files"),
        (("a.yaml", "x_prefill_graph.mindir"), "only one of a pair"),
        (("a.yaml", "x_inc_graph.mindir"), "no file ..._prefill_graph.mindir"),
        (("a.yaml", "x_inc_graph.mindir", "y_inc_graph.mindir"), "got x_inc_graph.mindir, y_inc"),
    ],
)
def test_folders_that_are_ambiguous(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        files_of(touch(tmp_path / "prefill", *names))


def test_what_no_model_can_be_found_for(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such folder, and no model"):
        infer_config("missing", {})
    with pytest.raises(ArtifactError, match="no such file"):
        offline_config(InferConfig(prefill_model_path=str(tmp_path / "x.mindir")))
    with pytest.raises(ConfigError, match="no manifest says which model"):
        offline_config(InferConfig())
    with pytest.raises(ConfigError, match="rank_id=1"):
        offline_config(InferConfig(model_name="tiny_llama", rank_id=1))


def test_a_name_is_a_run_with_backend_mslite() -> None:
    config = InferConfig(model_name="tiny_llama", infer_seq_length=128, target="CPU")
    run = offline_config(config).run_config()
    assert (run.backend, run.infer.infer_seq_length) == ("mslite", 128)
    assert (run.model_name, run.context.device_target) == ("tiny_llama", "CPU")
