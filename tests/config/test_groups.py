"""Composing conf/: once for the same files, also if the result is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lite_runner.config import groups
from lite_runner.config.argv import parse
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from lite_runner.system.yaml_file import read_yaml


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that is composed in its place."""
    copy = tmp_path / "conf"
    shutil.copytree(groups.conf_dir(), copy)
    monkeypatch.setattr(groups, "conf_dir", lambda: copy)
    return copy


def test_shared_settings_stand_in_the_base_of_models() -> None:
    folder = groups.conf_dir()
    base = _lines(read_yaml(folder / "model_base.yaml"))
    own = {path: _lines(read_yaml(path)) for path in (folder / "model").glob("*.yaml")}
    for path in (folder / "model_family").glob("*.yaml"):
        family = _lines(read_yaml(path))
        builds_on_it = ("defaults", f"['/model_family/{path.stem}', '_self_']")
        members = [lines for lines in own.values() if builds_on_it in lines]
        assert len(members) > 1 and set.intersection(*members) == {builds_on_it}, path
        own = {one: lines for one, lines in own.items() if builds_on_it not in lines}
        own[path] = family
    assert len(own) > 10
    assert set.intersection(*own.values()) == {("defaults", "['/model_base', '_self_']")}
    assert not base & set.union(*own.values())
    for one in groups.options_of("model"):
        assert base <= _lines(groups.compose_groups({"model": one})), one


def test_the_base_of_the_models_is_no_model() -> None:
    assert "model_base" not in groups.options_of("model")
    for words in ("model=model_base", "model_base=x", "model=/model_base"):
        with pytest.raises(ConfigError):
            resolve(parse([words, "predict_data=hi"], heads()))


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("qwen3_0.6b", "ms://Qwen/Qwen3-0.6B"),
        ("gemma2_2b", "ms://LLM-Research/gemma-2-2b-it"),
        ("llama3.1_8b", "ms://LLM-Research/Meta-Llama-3.1-8B-Instruct"),
        ("glm4_9b", "ms://ZhipuAI/glm-4-9b-chat"),
    ],
)
def test_a_models_own_source_on_modelscope(
    model: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert groups.own_source(model).startswith("hf://")
    monkeypatch.setenv("LITE_RUNNER_SOURCE", "modelscope")
    assert groups.own_source(model) == source
    config, _ = resolve(parse([f"model={model}", "predict_data=hi"], heads()))
    assert config.checkpoint_source == source == config.tokenizer.usual
    given = "hf://owner/name"  # which was chosen
    config, _ = resolve(
        parse([f"model={model}", f"load_checkpoint={given}", "predict_data=hi"], heads())
    )
    assert config.checkpoint_source == given


@pytest.mark.parametrize(
    ("group", "text", "expected"),
    [
        ("mine", "# @package _global_\nseed: 1 # caf\xe9", "broken yaml"),
        ("mine", "# @package _global_\ndefaults: 5", "defaults: got 5, expected a list"),
        ("mine", "# @package _global_\ndefaults: [own]", "its defaults lead back to itself"),
        ("model", "defaults: 5", "defaults: got 5, expected a list|do not compose"),
        ("model", "defaults: [own]", "its defaults lead back to itself|a circle of defaults"),
    ],
)
def test_broken_groups_of_the_users(group: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / group).mkdir()
    (tmp_path / group / "own.yaml").write_text(text, encoding="latin-1")
    word = "model=own" if group == "model" else f"+{group}=own"
    with pytest.raises(ConfigError, match=expected):
        resolve(parse(["-cd", str(tmp_path), word, "predict_data=hi"], heads()))


def test_packages_that_hold_no_groups() -> None:
    for name in ("__main__", "", "no_such_package"):
        with pytest.raises(ConfigError, match="no package"):
            groups.user_folder(f"pkg://{name}")


def test_an_unknown_hub_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_SOURCE", "github")
    with pytest.raises(ConfigError, match="LITE_RUNNER_SOURCE: got 'github', expected"):
        groups.own_source("qwen3_0.6b")


def _lines(raw: Mapping[str, Any], above: str = "") -> set[tuple[str, str]]:
    """Every key, dotted, with its value as text."""
    found = set()
    for key, value in raw.items():
        if isinstance(value, dict):
            found |= _lines(value, f"{above}{key}.")
        else:
            found.add((above + key, str(value)))
    return found


def test_an_answer_is_its_callers_own(conf: Path) -> None:
    first = groups.compose_groups({"model": "tiny_llama"})
    first["model"]["model_config"]["hidden_size"] = 1
    again = groups.compose_groups({"model": "tiny_llama"})
    assert again["model"]["model_config"]["hidden_size"] == 64
    other = groups.compose_groups({"model": "tiny_gpt2"})
    assert other["model"] != again["model"]


def test_a_file_that_changes_is_read_again(conf: Path) -> None:
    file = conf / "model/tiny_llama.yaml"
    groups.compose_groups({"model": "tiny_llama"})
    text, before = file.read_text(), file.stat()
    file.write_text(text.replace("hidden_size: 64", "hidden_size: 96"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = groups.compose_groups({"model": "tiny_llama"})
    assert changed["model"]["model_config"]["hidden_size"] == 96
    file.write_text("model: [")
    for _ in range(2):  # a fault is no answer to be kept
        with pytest.raises(ConfigError, match="do not compose"):
            groups.compose_groups({"model": "tiny_llama"})


def test_the_next_process_needs_no_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor reads the same yaml files again."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    code = (
        "import sys; from lite_runner.config.argv import parse\n"
        "from lite_runner.run_modes import heads, resolve\n"
        "words = ['model=tiny_llama', 'predict_data=x', 'max_new_tokens=3', 'temperature=0.5']\n"
        "config, _ = resolve(parse([*words, 'do_sample=true', 'top_k=null'], heads()))\n"
        "print(repr(config))\n"
        "print({'hydra', 'omegaconf', 'antlr4'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert first[0] == second[0]
    assert (first[1] != "set()", second[1]) == (True, "set()")


def test_one_composition_of_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"run_mode": "embed", "model": "tiny_llama"}
    first = groups.compose_groups(chosen)
    monkeypatch.setattr(groups, "_composed", None)
    assert groups.compose_groups(dict(reversed(chosen.items()))) == first


def test_a_variable_of_the_environment_is_read_each_time(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in (3, 5):
        monkeypatch.setenv("DEVICE_ID", str(device))
        assert groups.compose_groups({})["context"]["device_id"] == device
