"""The figures of the structure, of which some may not grow."""

from __future__ import annotations

from pathlib import Path

from scripts import house
from tests.tiny_gguf import write_tiny_gguf

MOST_FILES = 70  # that a warm predict executes
MOST_TO_BACKEND = 4  # on the stack from run_modes/predict.py to NativeBackend(
MOST_COMPARED = 25  # with names of backends, engines, layouts
MOST_IMPORTED = 60  # modules, at the import of predict


def test_a_predict_executes_no_more_files(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    files, called = house.executed(
        ["model=tiny.gguf", "predict_data=the", "max_new_tokens=2"], tmp_path
    )
    assert {"app.py", "native/model.py", "generation/scheduler.py"} <= set(files)
    assert len(files) <= MOST_FILES, f"{len(files)}: {', '.join(files)}"
    assert called[-1] == "backends/native/__init__.py" and len(called) <= MOST_TO_BACKEND, called


def test_importing_predict_imports_no_more_modules() -> None:
    found = house.closure(house.START, in_functions=False)
    assert {"lite_runner.output.completions", "lite_runner.architectures"} <= found
    assert len(found) <= MOST_IMPORTED, f"{len(found)}: {', '.join(sorted(found))}"
    assert found < house.closure(house.START, in_functions=True)


def test_tests_that_are_not_collected_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    assert house.items(tmp_path).startswith("1 test collected")
    (tmp_path / "test_other.py").write_text("import nowhere")
    text = house.items(tmp_path)
    assert text.startswith("not counted, -m pytest") and "ended with 2: 1 test collected" in text


def test_core_code_takes_no_config_of_a_run() -> None:
    """It takes its section, or plain values; a plan has the config for the run mode it is of."""
    assert house.taking_config() == ["lite_runner.plan.Plan.config"]


def test_names_of_backends_are_seldom_compared() -> None:
    names, formats = house.compared()
    assert 0 < names <= MOST_COMPARED and formats
