"""Which model a run means that names an exported one only."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.run_modes import heads, resolve

PAIR = {"prefill_model_path": "/old/a.mindir", "increment_model_path": "/old/b.mindir"}


def config(*words: str) -> RunConfig:
    return resolve(parse(["backend=mslite", "predict_data=x", *words], heads()))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "of a model"
    made.mkdir()
    return made


def write_yaml(folder: Path, name: str = "test.yaml", **sections: object) -> None:
    raw = {
        "run_mode": "export",
        "trainer": {"model_name": "tiny_bloom"},
        "model": {"model_config": {"type": "BloomConfig", "max_new_tokens": 7}},
        "infer": {**PAIR, "infer_seq_length": 64},
        **sections,
    }
    (folder / name).write_text(yaml.safe_dump(raw))


def test_a_manifest_has_the_sizes(folder: Path) -> None:
    (folder / "manifest.json").touch()
    for given in (f"infer.model_dir={folder}", f"infer.prefill_model_path={folder / 'x.mindir'}"):
        assert config(given).model_name == "auto"
        assert config(given, "model=tiny_gpt2").model_name == "tiny_gpt2"
    assert config(f"infer.model_dir={folder.parent}").model_name == "smollm2_135m"


def test_where_a_manifest_may_lie_is_no_model_to_export(folder: Path) -> None:
    (folder / "manifest.json").touch()
    paths = [f"infer.{key}={folder / key}.mindir" for key in PAIR]
    line = parse(["run_mode=export", *paths], heads())
    assert resolve(line)[0].model_name == "smollm2_135m"


def test_the_yaml_of_a_folder(folder: Path) -> None:
    write_yaml(folder)
    run = config(f"infer.model_dir={folder}")
    # That it exported, and to where, is not what it says of the model.
    assert (run.run_mode, run.infer.prefill_model_path, run.infer.infer_seq_length) == (
        "predict",
        "",
        64,
    )
    assert run.model_name == "tiny_bloom" and run.model.model_config.max_new_tokens == 7
    assert config(f"infer.model_dir={folder}", "model=tiny_gpt2").model_name == "tiny_gpt2"


def test_a_config_file_goes_before_it(folder: Path, tmp_path: Path) -> None:
    write_yaml(folder)
    write_yaml(tmp_path, "own.yaml", run_mode="predict", infer={"model_dir": str(folder)})
    own = ["--config", str(tmp_path / "own.yaml")]
    assert config(*own, "max_new_tokens=3").infer.model_dir == str(folder)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"infer": {"model_dir": str(folder)}}))
    assert config(*own).model_name == "smollm2_135m"
    (folder / "manifest.json").touch()
    assert config(*own).model_name == "auto"


def test_folders_that_say_nothing(folder: Path) -> None:
    write_yaml(folder)
    write_yaml(folder, "more.yml")
    with pytest.raises(ArtifactError, match=r"2 yaml files \(more.yml, test.yaml\)"):
        config(f"infer.model_dir={folder}")
    (folder / "more.yml").unlink()
    (folder / "test.yaml").write_text("{")
    with pytest.raises(ArtifactError, match="broken yaml"):
        config(f"infer.model_dir={folder}")
    assert config(f"infer.model_dir={'a' * 300}").model_name == "smollm2_135m"
    with pytest.raises(ConfigError, match="no NUL in a path"):
        config("infer.model_dir=a\0b")
