"""The model of a run that names an exported one only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.argv import parse
from lite_runner.config.model_dir import is_ours, model_yaml
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.checkpoint import model_config_of
from tests.references import REFERENCE

PAIR = {"prefill_model_path": "/old/a.mindir", "increment_model_path": "/old/b.mindir"}


def config(*words: str) -> RunConfig:
    return resolve(parse(["backend=mslite", "predict_data=x", *words], heads()))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "of a model"
    path.mkdir()
    return path


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


@pytest.mark.parametrize("mode", ["predict", "serve", "chat", "bench", "doctor"])
def test_an_export_is_run_by_its_folder_alone(folder: Path, mode: str) -> None:
    (folder / "manifest.json").write_text('{"schema": 1, "layout": "resizable", "graphs": {}}')
    prompts = ["predict_data=x"] if mode == "predict" else []
    for given in (f"model={folder}", f"infer.model_dir={folder}"):
        found: Any = resolve(parse([f"run_mode={mode}", given, *prompts], heads()))[0]
        assert (found.model_name, found.backend) == ("auto", "mslite")
        assert found.infer.model_dir == str(folder)
        words = [f"run_mode={mode}", given, "backend=auto", *prompts]
        assert resolve(parse(words, heads()))[0].backend == "mslite"


def test_a_manifest_of_something_else_is_a_checkpoint(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"name": "web app"}')
    run = resolve(parse([f"model={folder}", "predict_data=x"], heads()))[0]
    assert (run.load_checkpoint, run.backend) == (str(folder), "auto")


def test_a_manifest_beside_export_paths_names_no_model(folder: Path) -> None:
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


# MindFormers has a whole ratio of widths, and no words for what the other two scale or norm.
CASES = sorted(
    {path.parent.name for path in REFERENCE.glob("*/model.safetensors")}
    - {"gpt2_inner", "gpt2_by_layer", "bloom_normed"}
)

BASES = {
    "bloom": "bloom_560m",
    "gpt2": "gpt2",
    "qwen2": "qwen2_7b",
    "qwen2_moe": "qwen2_57b_a14b",
    "qwen3": "qwen3_8b",
    "mistral": "mistral_7b",
    "olmo2": "olmo2_1b",
    "granite": "granite3.1_2b",
    "chatglm_6b": "glm_6b",
    "smollm3": "smollm3_3b",
    "glm": "glm4_9b_hf",
    "glm4": "glm4_9b_0414",
    "chatglm": "glm2_6b",
    "gemma2": "gemma2_2b",
    "gemma3_text": "gemma3_1b",
    "qwen3_moe": "qwen3_30b_a3b",
    "mixtral": "mixtral_8x7b",
    "phi3": "phi4",
    "starcoder2": "starcoder2_3b",
    "gpt_neox": "pythia_160m",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "llama": "mistral_7b",  # whose window is not the model's
    "telechat": "telechat2_7b",
}


def alternating() -> Decoder:
    """A Qwen3 in which every other layer has a window, with biases."""
    model = model_config_of(REFERENCE / "qwen3_tied")
    window = replace(model.blocks[0], attention=replace(model.attention, window=8))
    return replace(model, blocks=(model.blocks[0], window, model.blocks[2]))


def test_reads_back(
    subtests: pytest.Subtests, resolve: Callable[..., RunConfig], tmp_path: Path
) -> None:
    experts = ("num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=512")
    mixture = [f"model.model_config.{one}" for one in experts]
    others = {
        "alternating": alternating(),
        "telechat": resolve("model=telechat2_7b", "predict_data=hi").model_config(),
        "experts": resolve("model=telechat2_7b", "predict_data=hi", *mixture).model_config(),
    }
    for case in [*CASES, *others]:
        model = others[case] if case in others else model_config_of(REFERENCE / case)
        if architecture_of(model).mindformers is None:
            continue  # MindFormers has no such model, so there is no yaml of it
        with subtests.test(case=case):
            # The yaml is laid over the model that it names, as it is written for that one.
            named = BASES[model.architecture]
            config = resolve(f"model={named}", "predict_data=hi")
            path = tmp_path / "model.yaml"
            text = model_yaml(model, config.settings, 32, "mindir_lite", use_past=True)
            path.write_text(text, encoding="utf-8")
            assert is_ours(path)
            found = resolve("--config", str(path), "predict_data=hi", "load_checkpoint=random")
            assert found.model_config() == model
