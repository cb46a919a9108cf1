"""Composing conf/: once for the same files, whatever is done with the answer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lite_runner.config import groups
from lite_runner.errors import ConfigError


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that is composed in its place."""
    copy = tmp_path / "conf"
    shutil.copytree(groups.conf_dir(), copy)
    monkeypatch.setattr(groups, "conf_dir", lambda: copy)
    return copy


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


def test_a_variable_of_the_environment_is_read_each_time(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in (3, 5):
        monkeypatch.setenv("DEVICE_ID", str(device))
        assert groups.compose_groups({})["context"]["device_id"] == device
