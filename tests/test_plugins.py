"""Plugins: Python files of the user's are run, and their registrations are found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.architectures import KNOWN
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.plugins import register_from, register_plugins
from lite_runner.system.environment import PLUGINS
from tests.refusals import refused

MODEL = """
import dataclasses

from lite_runner import register
from lite_runner.architectures import KNOWN

import family_name

register(dataclasses.replace(KNOWN["llama"], name=family_name.NAME))
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Remove imports and registrations of a test after it."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    KNOWN.pop("mine", None)
    for name in set(sys.modules) - modules:
        if not name.startswith(("mindspore", "lite_runner", "numpy")):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "plugins"
    path.mkdir()
    (path / "a_model.py").write_text(MODEL, encoding="utf-8")
    (path / "family_name.py").write_text('NAME = "mine"\n', encoding="utf-8")
    (path / "_not_run.py").write_text("raise OSError\n", encoding="utf-8")
    return path


@pytest.fixture
def line(tmp_path: Path, llama_called_mine: Path) -> list[str]:
    """A run of a tiny Llama whose config.json has an unknown name."""
    line = [
        "model=auto",
        f"load_checkpoint={llama_called_mine}",
        "predict_data=hi",
        "max_new_tokens=4",
    ]
    return [*line, f"output_dir={tmp_path / 'out'}", "verbosity=0"]


def text_of(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["results"][0]["text"])


def test_a_run_finds_what_the_files_register(folder: Path, tmp_path: Path, line: list[str]) -> None:
    assert main(line) == 4  # no such model
    assert main([*line, "--register_path", str(folder)]) == 0
    assert main([*line, f"plugins={folder / 'a_model.py'}"]) == 0  # twice does no harm
    text = text_of(tmp_path / "out/latest")
    assert main([*line, f"plugins={folder}", "quant=a16w8"]) == 0  # which our operators do alone
    config = tmp_path / "model/config.json"
    config.write_text(config.read_text().replace('"mine"', '"llama"'))
    assert main(line) == 0
    assert text_of(tmp_path / "out/latest") == text


def test_ranks_find_it_too(folder: Path, tmp_path: Path, line: list[str]) -> None:
    line = [*line, f"plugins={folder}"]
    assert main(line) == 0
    alone = text_of(tmp_path / "out/latest")
    assert main([*line, "use_parallel=true", "parallel_config.model_parallel=2"]) == 0
    assert text_of(tmp_path / "out/latest") == alone


def test_an_installed_package_is_found(
    folder: Path, tmp_path: Path, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = folder / "my_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{PLUGINS}]\nmine = a_model\n")
    monkeypatch.syspath_prepend(folder)
    assert main(line) == 0
    (folder / "a_model.py").write_text("raise OSError('of the plugin')\n")
    del sys.modules["a_model"]
    with pytest.raises(EnvironmentFault, match="plugin mine of my-models fails: OSError: of the"):
        register_plugins()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("def broken(:", "SyntaxError"),
        (
            "from lite_runner import register\nregister('a b', network=1, tensors=1, config=1)",
            "a b",
        ),
    ],
)
def test_a_file_that_fails_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "fails.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        register_from(str(file))
    assert "fails.py" in caught.value.message


def test_invalid_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plugins: ~no_such_user/x: there is no such user"):
        register_from("~no_such_user/x")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="expected a folder of Python files"):
            register_from(str(path))
    (tmp_path / "json.py").touch()
    with pytest.raises(ConfigError, match="another module is called json"):
        register_from(str(tmp_path))


def test_an_empty_name_runs_nothing(
    folder: Path,
    line: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    (folder / "a_model.py").write_text("raise OSError\n")
    for word in ("plugins=", "plugins=family_name.py,", "--register_path="):
        assert main([*line, word]) == 2, word
        assert "plugins: got an empty name" in capsys.readouterr().err, word


def test_a_yaml_cannot_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    for key in ("register_path", "plugins"):
        file.write_text(f"{key}: plugins\ntrainer: {{model_name: gpt2}}\n", encoding="utf-8")
        refused(["--config", str(file), "--predict_data", "hi"], 2)
        assert "taken from the command line only" in capsys.readouterr().err
