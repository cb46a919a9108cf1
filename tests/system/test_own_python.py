from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.system import own_python
from tests.paths import ROOT

# `python` of these is whatever the user has.
SCRIPTS = [
    ROOT / "scripts" / f"{name}.py"
    for name in (
        *("convert_weight", "export", "hccl_tools", "merge_hccl", "merge_strategies"),
        *("run_infer_main", "transform_checkpoint"),
    )
]
BARE = (sys.executable, "-S")  # this Python without the packages of its environment


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what starts a program; the program prints its interpreter's flags and its words."""
    copy = tmp_path / "a check out"
    shown = "import sys\ndef console(): print(sys.flags.no_site, sys.argv[1:])\n"
    (copy / "lite_runner/system").mkdir(parents=True)
    for name in ("__init__.py", "system/__init__.py", "system/own_python.py"):
        shutil.copy(ROOT / "lite_runner" / name, copy / "lite_runner" / name)
    (copy / "lite_runner/app.py").write_text(shown)
    shutil.copy(ROOT / "run_lite.py", copy)
    return copy


def own(checkout: Path, command: str) -> Path:
    """The checkout's own Python: a shell script."""
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    return python


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, encoding="utf-8", timeout=60
    )


def test_it_continues_in_the_own_environment(checkout: Path, tmp_path: Path) -> None:
    own(checkout, "printf '<%s>' \"$@\"; exit 7")
    done = run(*BARE, checkout / "run_lite.py", "predict_data=a b", "*", cwd=tmp_path)
    assert done.stdout == f"<{checkout / 'run_lite.py'}><predict_data=a b><*>"
    assert (done.returncode, done.stderr) == (7, "")  # as it is with every start: nothing to say
    done = run(*BARE, "run_lite.py", "verbosity=2", cwd=checkout)
    [note] = done.stderr.splitlines()
    assert note == f"note: {sys.executable} has no certifi; continuing in {checkout / '.venv'}"


def test_an_environment_that_lacks_the_same_is_no_loop(checkout: Path) -> None:
    own(checkout, f'exec "{sys.executable}" -S "$@"')
    done = run(*BARE, "run_lite.py", "x", "verbosity=2", cwd=checkout)
    assert done.stdout == "1 ['x', 'verbosity=2']\n" and done.stderr.count("continuing in") == 1


def test_a_python_that_has_all_stays(checkout: Path) -> None:
    own(checkout, "echo never")
    done = run(sys.executable, "run_lite.py", "x", cwd=checkout)
    assert (done.stdout, done.stderr) == ("0 ['x']\n", "")


@pytest.mark.parametrize("damage", ["none", "unfinished", "dangling"])
def test_without_a_whole_environment_it_goes_on_here(checkout: Path, damage: str) -> None:
    if damage != "none":
        python = own(checkout, "echo never")
        if damage == "unfinished":
            (checkout / ".venv/.unfinished").touch()
        else:
            python.unlink()
            python.symlink_to("/nowhere/python")
    done = run(*BARE, "run_lite.py", "x", cwd=checkout)
    assert (done.stdout, done.stderr) == ("1 ['x']\n", "")


def test_a_module_is_started_as_a_module(checkout: Path) -> None:
    own(checkout, "printf '<%s>' \"$@\"")
    folder = checkout / "lite_runner/mindformers"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(ROOT / "lite_runner/mindformers/__main__.py", folder)
    done = run(*BARE, "-m", "lite_runner.mindformers", "predict.py", cwd=checkout)
    assert done.stdout == "<-m><lite_runner.mindformers.__main__><predict.py>"


def test_a_python_that_is_too_old_is_reported(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_python, "OLDEST", (99,))
    monkeypatch.setattr(own_python, "_ROOT", checkout)
    with pytest.raises(SystemExit) as ended:
        own_python.continue_in_own_python()
    assert ended.value.code == 3
    error = capsys.readouterr().err
    assert "is Python 3." in error and "make run" in error and str(checkout) in error


def test_old_pythons_can_read_what_starts_a_program() -> None:
    first = (
        "run_lite.py",
        "lite_runner/__init__.py",
        "lite_runner/system/__init__.py",
        "lite_runner/system/own_python.py",
    )
    started = [
        *SCRIPTS,
        *(ROOT / "lite_runner/mindformers" / f"__{x}__.py" for x in ("init", "main")),
    ]
    for path in (ROOT / name for name in first):
        text = path.read_text(encoding="utf-8")
        ast.parse(text, feature_version=(3, 6))
        assert "from __future__ import annotations" not in text  # of 3.7
    for path in started:
        text = path.read_text(encoding="utf-8")
        ast.parse(text, feature_version=(3, 7))
        assert "__init__" in path.name or "\n    continue_in_own_python()\n" in text


def test_required_packages_equal_those_of_setup() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    required = {
        line.split()[0] for line in setup["options"]["install_requires"].splitlines() if line
    }
    modules = {"hydra-core": "hydra", "pyyaml": "yaml"}
    expected = {modules.get(name, name) for name in required if not name.startswith("#")}
    assert set(own_python.MODULES) == expected - {"mindspore", "protobuf"}
