"""The models of exported graphs, recognized by the files beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner import AutoConfig, AutoTokenizer, InferConfig, InferTask, pipeline
from lite_runner.api.exported import exported_config, files_of, infer_config
from lite_runner.app import main
from lite_runner.config import groups
from lite_runner.errors import ArtifactError, ConfigError, RunnerError
from tests.each import each


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ConfigError, "neither a manifest nor a yaml names the model"),
        ({"prefill_model_path": "y.mindir"}, ConfigError, "neither a manifest nor a yaml"),
        ({"model_name": "bloom"}, ConfigError, "model: got 'bloom'"),  # without graphs
        ({"model_name": "glm"}, ConfigError, "model: got 'glm'"),
        ({"prefill_model_path": "y.mindir", "model_name": "bloom"}, ArtifactError, "not a MindIR"),
    ],
)
def test_a_model_that_cannot_be_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    error: type[RunnerError],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("y.mindir").touch()
    with pytest.raises(error, match=message):
        exported_config(InferConfig(**fields))


def test_a_graph_that_is_missing(tmp_path: Path) -> None:
    missing = InferConfig(prefill_model_path=str(tmp_path / "x.mindir"), model_name="tiny_llama")
    with pytest.raises(ArtifactError, match="no such file"):
        InferTask.get_infer_task("text_generation", missing)


def test_a_name_is_a_run_with_backend_mslite() -> None:
    place = {"rank_id": 1, "device_id": 3}
    config = InferConfig(model_name="tiny_llama", infer_seq_length=128, target="CPU", **place)
    run = exported_config(config).run_config()
    assert (run.infer.rank_id, run.context.device_id) == (1, 3)
    assert (run.backend, run.infer.infer_seq_length) == ("mslite", 128)
    assert (run.model_name, run.context.device_target) == ("tiny_llama", "CPU")


@pytest.fixture
def shallow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny_bloom of one layer, half as much to compile."""
    conf = shutil.copytree(groups.conf_dir(), tmp_path / "shallow")
    file = conf / "model/tiny_bloom.yaml"
    text = file.read_text(encoding="utf-8")
    assert text.count("num_layers: 2") == 1
    file.write_text(text.replace("num_layers: 2", "num_layers: 1"), encoding="utf-8")
    monkeypatch.setattr(groups, "conf_dir", lambda: conf)


@pytest.mark.usefixtures("shallow", "unverified")
def test_graphs_from_elsewhere_say_what_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair with its manifest, without it by name, and with a yaml only."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    export = ["run_mode=export", "model=tiny_bloom", "export.layout=static_pair"]
    assert main([*export, "infer.infer_seq_length=48", "export_output=x"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("tiny_bloom")
    paths = tuple(map(str, files_of(Path("x")).values()))

    def output_of(model: str | tuple[str, ...], **settings: Any) -> list[dict[str, list[str]]]:
        generate = pipeline(
            "text_generation", model, tokenizer=tokenizer, backend="mslite", **settings
        )
        return generate("I love Beijing", max_length=40)

    ours = output_of("x")
    assert len(ours[0]["text_generation_text"][0]) > len("I love Beijing")
    assert output_of(paths) == ours
    by_paths = pipeline("text_generation", paths, tokenizer=tokenizer)
    assert by_paths("I love Beijing", max_length=40) == ours
    Path("x/manifest.json").unlink()
    assert output_of("x") == ours
    assert output_of(paths, model_name="tiny_bloom") == ours
    Path("x/tiny_bloom.yaml").unlink()
    assert output_of(paths, model_name="tiny_bloom") == ours
    # A family: its sizes are those of the graphs, which are asked for by the other name here.
    other = tuple(path.replace("_graph.mindir", "") for path in paths)
    assert output_of(other, model_name="bloom") == ours
    config = exported_config(InferConfig(*paths, model_name="bloom")).run_config().model_config()
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
        wanted = AutoConfig.from_pretrained("tiny_bloom").run_config().model_config()
        assert getattr(config, name) == getattr(wanted, name)
    with pytest.raises(ArtifactError, match="which is a llama"):
        output_of(paths, model_name="tiny_llama")


@pytest.mark.usefixtures("shallow", "unverified")
def test_the_infer_section_of_a_named_models_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """000, call 1, where the yaml is of MindFormers' configs/ or of conf/model; the call wins."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    export = ["run_mode=export", "model=tiny_bloom", "export.layout=static_pair"]
    assert main([*export, "infer.infer_seq_length=48", "export_output=x"]) == 0
    section = {"infer": {**files_of(Path("x")), "infer_seq_length": 48, "model_type": "mindir"}}
    tokenizer = AutoTokenizer.from_pretrained("tiny_bloom")

    def graph_and_text(model: str | tuple[str, ...], **settings: Any) -> tuple[str, str]:
        """The graph that is run, and its text."""
        generate = pipeline(
            "text_generation", model, tokenizer=tokenizer, backend="mslite", **settings
        )
        (text,) = generate("I love Beijing", max_length=40)[0]["text_generation_text"]
        return generate.model.config.run_config().infer.prefill_model_path, text

    expected = graph_and_text(tuple(files_of(Path("x")).values()), model_name="tiny_bloom")
    yaml_file = tmp_path / "configs" / "bloom" / "run_tiny_bloom.yaml"
    yaml_file.parent.mkdir(parents=True)
    yaml_file.write_text(yaml.safe_dump(section))
    capsys.readouterr()
    assert graph_and_text("tiny_bloom", ge_config_path="") == expected
    assert "infer: taken from configs/bloom/run_tiny_bloom.yaml" in capsys.readouterr().err
    yaml_file.unlink()
    assert graph_and_text("tiny_bloom", infer_seq_length=48)[0] == ""  # its own weights

    conf = tmp_path / "conf"
    shutil.copytree(groups.conf_dir(), conf)
    with (conf / "model/tiny_bloom.yaml").open("a") as file:
        file.write(yaml.safe_dump(section))
    monkeypatch.setattr(groups, "conf_dir", lambda: conf)
    assert graph_and_text("tiny_bloom") == expected
    capsys.readouterr()
    line = ["model=tiny_bloom", "predict_data=I love Beijing", "max_length=40", "verbosity=0"]
    assert main([*line, "backend=mslite"]) == 0
    assert expected[1] == "I love Beijing" + capsys.readouterr().out.removesuffix("\n")
    shutil.rmtree("x")
    assert main([*line, "backend=mslite"]) == 4
    assert main([*line, "dry_run=true"]) == 0  # online the graphs are not of the run


@pytest.mark.usefixtures("unverified")
def test_an_export_of_another_length_than_the_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls 2 and 4 of MindFormers' document: the export's numbers are taken."""
    monkeypatch.chdir(tmp_path)
    length = ["model.model_config.seq_length=384", "infer.infer_seq_length=300"]
    export = ["run_mode=export", "model=tiny_bloom", "export.layout=static_pair", *length]
    assert main([*export, "export_output=x"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("tiny_bloom")
    prefill, increment = files_of(Path("x")).values()
    config = InferConfig(prefill, increment, model_name="tiny_bloom", infer_seq_length=512)
    text = "I love Beijing, because " * 11  # more tokens than the model of this name takes
    for manifest in Path("x/manifest.json"), None:
        if manifest is None:
            Path("x/manifest.json").unlink()
        capsys.readouterr()
        second = pipeline(
            "text_generation",
            (prefill, increment),
            tokenizer=tokenizer,
            backend="mslite",
            model_name="tiny_bloom",
            infer_seq_length=512,
        )
        (answer,) = second(text, max_new_tokens=8)
        assert "tiny_bloom has 256" in capsys.readouterr().err
        assert len(answer["text_generation_text"][0]) > len(text)
        fourth = InferTask.get_infer_task("text_generation", config, tokenizer=tokenizer)
        assert fourth(text, max_new_tokens=8) == [answer]


def test_tasks() -> None:
    assert InferTask.support_list() == ["text_generation"]
    assert InferTask.check_task_valid("text_generation")
    assert not InferTask.check_task_valid("translation")
    with pytest.raises(ConfigError, match="did you mean text_generation"):
        InferTask.get_infer_task("text_generations", InferConfig())


@each(
    ("fields", "message"),
    [
        ({"model_type": "onnx"}, "expected one of mindir, mindir_lite"),
        ({"target": "GPU"}, "expected one of auto, Ascend, CPU"),
        ({"device_id": -1}, "device_id: got -1, expected an integer >= 0"),
        ({"infer_seq_length": 0}, ">= 1"),
        ({"infer_seq_length": True}, ">= 1"),
        ({"prefill_model_path": 3}, "expected a string"),
        ({"ge_config_path": ["a", 3]}, "expected a string"),
        ({"dynamic": 1}, "expected True or False"),
        ({"infer_seq_len": 1}, "no such field; did you mean infer_seq_length"),
    ],
)
def test_values_that_cannot_be(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferConfig(fields)
    with pytest.raises(ConfigError, match=message):
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


def test_defaults_are_mindformers() -> None:
    """But for `target`, which was Ascend: here it is what the machine has."""
    assert dict(InferConfig()) == {
        **dict.fromkeys(("prefill_model_path", "increment_model_path", "ge_config_path"), ""),
        "model_type": "mindir",
        "model_name": "common",
        "infer_seq_length": 1024,
        "target": "auto",
        **dict.fromkeys(("device_id", "rank_id"), 0),
        "dynamic": False,
    }


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
    ("names", "message"),
    [
        (("a.yaml", "b.yaml", "x.mindir"), "2 yaml files"),
        (("a.yaml",), "no MindIR in it"),  # more of these: tests/model/test_exported_model.py
        (("manifest.json", "x.mindir"), "not a manifest"),
    ],
)
def test_folders_that_are_ambiguous(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        files_of(touch(tmp_path / "prefill", *names))


def test_a_folder_that_is_missing() -> None:
    with pytest.raises(ArtifactError, match="no such folder, and no model"):
        infer_config("missing", {})


def test_a_field_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="quant: no such field"):
        InferConfig(quant="a16w8")
