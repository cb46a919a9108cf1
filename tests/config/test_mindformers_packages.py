"""Every yaml that comes in the mindformers packages for a model of ours runs, or says what is
missing: the packages are fetched, and what came of each file last is in
mindformers_yaml_outcomes.yaml. Without a network the tests are left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads
from lite_runner.run_modes import resolve as resolve_line
from tests.paths import REFERENCE

OUTCOMES = Path(__file__).with_name("mindformers_yaml_outcomes.yaml")

OURS = {"BloomLMHeadModel", "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"}
HERE = ("--run_mode", "predict", "--device_target", "CPU", "--use_parallel", "False")
RANDOM = ("--load_checkpoint", "random", "--predict_data", "hello")
Packages = Callable[[str], Path]


def outcomes() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(OUTCOMES.read_text(encoding="utf-8"))
    return loaded


def files_of_ours(configs: Path) -> Iterator[tuple[str, bool]]:
    """Each file for a model of ours, or to predict with a folder's, and whether it is such."""
    for path in sorted(configs.rglob("*.yaml")):
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        model, name = raw.get("model") or {}, path.relative_to(configs).with_suffix("").as_posix()
        folder = raw.get("pretrained_model_dir") is not None and raw.get("run_mode") == "predict"
        if folder or (model.get("arch") or {}).get("type") in OURS:
            yield name, folder


@pytest.mark.parametrize("release", outcomes()["sizes"])
def test_each_file_is_taken_or_says_what_is_missing(
    mindformers_package: Packages, release: str
) -> None:
    configs, found = mindformers_package(release), {}
    for name, _ in files_of_ours(configs):
        try:
            given = ["--load_checkpoint", "x.ckpt", "--predict_data", "hello"]
            line = ["--config", str(configs / f"{name}.yaml"), *HERE, *given]
            resolve_line(parse(line, heads()))
            found[name] = "runs"
        except ConfigError as error:
            found[name] = error.message
    expected = {
        name: text for text, names in outcomes()["sizes"][release].items() for name in names
    }
    assert found.keys() == expected.keys()
    assert {name: found[name] for name, text in expected.items() if text not in found[name]} == {}


@pytest.mark.parametrize("release", outcomes()["folder"])
def test_each_file_of_a_folder_runs_or_says_what_the_model_is(
    mindformers_package: Packages, release: str, tmp_path: Path
) -> None:
    configs, expected = mindformers_package(release), outcomes()["folder"][release]
    assert {name for name, folder in files_of_ours(configs) if folder} == expected.keys()
    for name, kind in expected.items():
        folder = REFERENCE / kind
        if not folder.is_dir():
            folder = tmp_path / kind
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        line = ["--config", str(configs / f"{name}.yaml"), *HERE, *RANDOM]
        config, _ = resolve_line(parse([*line, "--pretrained_model_dir", str(folder)], heads()))
        if folder.parent == REFERENCE:
            assert locate(config).model.architecture == kind
        else:
            with pytest.raises(RunnerError, match=f"model_type.*{kind}"):
                locate(config)


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("1.0.2", "bloom/run_bloom_560m"),
        ("1.0.2", "gpt2/run_gpt2"),
        ("1.0.2", "llama2/predict_llama2_70b_910b"),
        ("1.3.2", "codellama/predict_codellama_34b"),
        ("1.3.2", "gpt2/predict_gpt2_small_fp16"),
        ("1.3.2", "llama2/predict_llama2_13b_rtn"),
    ],
)
def test_some_files_really_run_with_small_sizes(
    mindformers_package: Packages, release: str, name: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 320}
    if name.startswith(("llama2", "codellama")):
        sizes |= {"n_kv_heads": 2, "multiple_of": 16}
    if name.startswith("gpt2"):
        sizes |= {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    else:
        sizes["seq_length"] = 64
    flags = [
        word for key, value in sizes.items() for word in (f"--model.model_config.{key}", value)
    ]
    line = ["--config", mindformers_package(release) / f"{name}.yaml", *HERE, *RANDOM, *flags]
    more = ["processor.tokenizer.type=ByteTokenizer", f"output_dir={tmp_path}", "max_new_tokens=3"]
    more += ["processor.tokenizer.tokenizer_file=null"]
    assert main([*map(str, line), *more, "verbosity=0"]) == 0
    result = json.loads((tmp_path / "latest/result.json").read_text(encoding="utf-8"))
    assert 0 < result["results"][0]["generated_tokens"] <= 3
