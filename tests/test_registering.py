"""--register_path: Python files of the user's are run, and register what a run then finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.architectures import KNOWN
from lite_runner.errors import ConfigError
from lite_runner.export.pair_inputs import MAPPING
from lite_runner.registering import register_from
from lite_runner.text.tokenizer import byte_tokenizer

MODEL = """
import dataclasses

from lite_runner import register
from lite_runner.architectures import KNOWN
from lite_runner.architectures.naming import parameters_of
from lite_runner.models.decoder import DecoderCell

import family_name

LLAMA = KNOWN["llama"]


def tensors(model):
    return [one for one in parameters_of(model, LLAMA.names) if one.role != "head"]


register(
    family_name.NAME,
    network=DecoderCell,
    tensors=tensors,
    config=lambda fields: dataclasses.replace(LLAMA.read(fields), architecture=family_name.NAME),
)
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test imports and registers is gone behind it."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    KNOWN.pop("mine", None)
    MAPPING.pop("mine", None)
    for name in set(sys.modules) - modules:
        if not name.startswith(("mindspore", "lite_runner", "numpy")):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "plugins"
    made.mkdir()
    (made / "a_model.py").write_text(MODEL, encoding="utf-8")
    (made / "family_name.py").write_text('NAME = "mine"\n', encoding="utf-8")
    (made / "_not_run.py").write_text("raise OSError\n", encoding="utf-8")
    return made


def test_a_run_finds_what_the_files_register(
    folder: Path, tmp_path: Path, write_tiny_llama: Callable[..., Path]
) -> None:
    model = write_tiny_llama("model")
    for name, text in byte_tokenizer().files().items():
        (model / name).write_text(text, encoding="utf-8")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(settings | {"model_type": "mine"}))
    line = ["model=auto", f"load_checkpoint={model}", "predict_data=hi", "max_new_tokens=2"]
    line += [f"output_dir={tmp_path / 'out'}", "verbosity=0"]
    assert main(line) == 4  # no such model
    assert main([*line, "--register_path", str(folder)]) == 0
    assert main([*line, f"register_path={folder}"]) == 0  # twice does no harm
    ranks = ["use_parallel=true", "parallel_config.data_parallel=1"]
    assert main([*line, "--register_path", str(folder), *ranks]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("def broken(:", "SyntaxError"),
        (
            "from lite_runner import register\nregister('a b', network=1, tensors=1, config=1)",
            "a b",
        ),
    ],
)
def test_a_file_that_fails_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fails.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        register_from(str(file))
    assert "fails.py" in caught.value.message


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="expected a folder of Python files"):
            register_from(str(path))
    (tmp_path / "json.py").touch()
    with pytest.raises(ConfigError, match="another module is called json"):
        register_from(str(tmp_path))


def test_a_yaml_cannot_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("register_path: plugins\ntrainer: {model_name: gpt2}\n", encoding="utf-8")
    assert main(["--config", str(file), "--predict_data", "hi"]) == 2
    assert "taken from the command line only" in capsys.readouterr().err
