"""InferConfig, InferTask and the folders of exported models."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import InferConfig, InferTask
from lite_runner.api.infer_config import files_of, infer_config
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
        ({"ge_config_path": ["a", 3]}, "expected a text"),
        ({"dynamic": 1}, "expected True or False"),
        ({"infer_seq_len": 1}, "no such field; did you mean infer_seq_length"),
    ],
)
def test_values_that_cannot_be(fields: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        InferConfig(fields)
    with pytest.raises(ConfigError, match=said):
        InferConfig().update(fields)


def test_a_config_is_a_mapping_too() -> None:
    """MindFormers' InferConfig is a DictConfig: attributes are entries."""
    config = InferConfig(model_name="tiny_llama", ge_config_path=("a.ini", Path("b.ini")))
    config.device_id = 3
    config["rank_id"] = 1
    assert (config.device_id, config.rank_id, config["model_name"]) == (3, 1, "tiny_llama")
    assert config.ge_config_path == ("a.ini", "b.ini") and config.get("target") == "auto"
    assert InferConfig(config) == config == InferConfig(**config)
    assert InferConfig({"infer_seq_length": 512}).infer_seq_length == 512
    with pytest.raises(AttributeError, match="did you mean device_id"):
        _ = config.device


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
    }
    single = touch(tmp_path / "single", "y_graph.mindir")
    assert files_of(single) == {"prefill_model_path": str(single / "y_graph.mindir")}
    config, rest = infer_config(folder, {"device_id": 2, "max_length": 9})
    # The config.ini in the folder is found by the run itself.
    assert (config.device_id, config.ge_config_path) == (2, "")
    assert rest == {"max_length": 9}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a.yaml", "b.yaml", "x.mindir"), "2 yaml files"),
        (("a.yaml",), "no MindIR in it"),  # more of these: tests/test_given_model.py
        (("manifest.json", "x.mindir"), "not a manifest"),
    ],
)
def test_folders_that_are_ambiguous(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        files_of(touch(tmp_path / "prefill", *names))


def test_a_folder_that_is_missing() -> None:
    with pytest.raises(ArtifactError, match="no such folder, and no model"):
        infer_config("missing", {})


def test_a_field_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="quant: no such field"):
        InferConfig(quant="a16w8")
