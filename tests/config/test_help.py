"""--help and --help RUN_MODE."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import app
from lite_runner.config import leaves
from lite_runner.config.groups import compose_groups, conf_dir, options_of
from lite_runner.config.help import _wrapped, key_tables, keys_in
from lite_runner.run_modes import schemas
from tests.config.test_defaults import OF_SOME_MODELS
from tests.each import each

RUN_MODES = options_of("run_mode")


@each("mode", RUN_MODES)
def test_the_help_of_a_run_mode_has_all_its_keys(mode: str) -> None:
    tables = key_tables(mode, schemas())
    listed = [key for keys in tables.values() for key in keys]
    names = [key.name for key in listed]
    assert len(names) == len(set(names))
    config = schemas().config_of(mode)
    known = {
        key
        for key in leaves(config, compose_groups({"run_mode": mode})).keys() - OF_SOME_MODELS
        if config.takes_parallel or key not in parallel_keys()
    }
    sections = {name.rpartition(".")[0] for name in names}
    assert known - {"run_mode", "backend"} - sections == set(names)
    assert not [key.name for key in listed if not key.meaning and not is_of_a_model(key.name)]


def parallel_keys() -> set[str]:
    return {key.name for key in keys_in(conf_dir() / "parallel/single.yaml")}


def is_of_a_model(name: str) -> bool:
    return name.startswith(("model.", "trainer.", "processor."))


@pytest.mark.parametrize(
    "words",
    [
        ["--help", "serve"],
        ["--help=serve"],
        ["-h", "serve"],
        ["serve", "--help"],
        ["run_mode=serve", "--help"],
        ["--run_mode", "serve", "-h"],
        ["--help", "run_mode=serve"],
    ],
)
def test_help_of_a_run_mode(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(words) == 0
    out = capsys.readouterr().out
    assert "run_mode=serve" in out and "serve.port=8000" in out and "0: a free one" in out
    assert "eval_data" not in out


def test_help_shows_the_model_that_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help", "predict", "model=gpt2"]) == 0
    out = capsys.readouterr().out
    assert "model=gpt2" in out and "model.arch.type=GPT2LMHeadModel" in out


def test_help_of_an_unknown_run_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help", "srve"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


def test_comments_and_defaults_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: '# no'  # yes # both\nb:\n  c: [1, 2] # list\n  d: null\n")
    found = [(key.name, key.default, key.meaning) for key in keys_in(path)]
    assert found == [("a", "'# no'", "yes # both"), ("b.c", "[1, 2]", "list"), ("b.d", "null", "")]


def test_a_word_with_hyphens_stays_whole() -> None:
    lines = _wrapped("  key=x    ", " ".join(["what-is-typed-again"] * 20)).splitlines()
    assert len(lines) > 4 and all(line.endswith("what-is-typed-again") for line in lines)
    assert all(line.startswith("           w") for line in lines[1:])
