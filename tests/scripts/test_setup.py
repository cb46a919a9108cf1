"""The shell scripts, in a copy of the few files they need: nothing is installed here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from lite_runner.backends.mindformers.process import MindFormersProcess
from lite_runner.backends.mindformers.releases import RELEASES
from tests.paths import CONFTEST, ROOT

MINDFORMERS = [("mindformers", "1.0.2"), ("mindformers-1.9", "1.9.0")]
PIP = "-m pip install --no-input --progress-bar off"
LOCKED = f"{PIP} --require-hashes --no-build-isolation --use-pep517 --requirement .venv/locked.txt"
# What builds packages, the packages, and this one.
OF_THE_LOCK = [LOCKED, LOCKED, f"{PIP} --no-deps --no-build-isolation --editable ."]


def run(
    *command: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHON": "", "PYTHON37": "", **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def python_of(version: str, path: Path) -> Path:
    """A stand-in that says it is Python `version`; an environment made by it is a copy of it.

    `-m pip install` in such an environment succeeds and appends its arguments to pip.txt, in the
    current folder; it fails where a file `no-network` stands there.
    """
    return executable(
        path,
        f"""
case "$*" in
  -V) echo "Python {version}.1" ;;
  *version_info*) echo {version} ;;
  *"-m venv"*)
    for venv; do :; done
    [ -e "$venv/.unfinished" ] || echo "an environment that looks finished" >>pip.txt
    mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python"; echo venv >>pip.txt ;;
  *"-m pip install"*)
    if [ -e no-network ]; then echo "Could not reach the index"; exit 1; fi
    echo "$* $PIP_CONSTRAINT" >>pip.txt ;;
  *"-m pip uninstall"*) echo "$*" >>removed.txt ;;
  *"-m compileall"*) echo "$*" >>compiled.txt ;;
esac
""",
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "a checkout"
    pins = [f"requirements/{name}.txt" for name in ("lock", "peers", "lite")]
    pins += ["requirements/mindformers.txt", "requirements/mindformers-1.9.txt"]
    pins += ["requirements/ray.txt"]
    for name in ("scripts/setup.sh", "scripts/llama_flags.sh", *pins):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in ("setup.cfg", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    source = copy / "lite_runner/native/src/operators.cc"
    source.parent.mkdir(parents=True)
    source.write_text("int main() {}\n")
    return copy


@pytest.fixture
def no_python(tmp_path: Path) -> dict[str, str]:
    """An environment with the tools of setup.sh on PATH, and no Python anywhere."""
    folder = tmp_path / "path"
    folder.mkdir()
    for tool in ("bash", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "sed", "touch", "env"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    return {"PATH": str(folder), "PYENV_ROOT": str(tmp_path / "pyenv")}


def setup(
    checkout: Path, target: str = "run", version: str = "3.11"
) -> subprocess.CompletedProcess[str]:
    python = python_of(version, checkout.parent / f"bin/python{version}")
    return run("scripts/setup.sh", target, cwd=checkout, env={"PYTHON": str(python)})


def installs(checkout: Path) -> list[str]:
    log = checkout / "pip.txt"
    return [line.rstrip() for line in log.read_text().splitlines()] if log.exists() else []


def packages(checkout: Path) -> str:
    """The packages that pip was to install last, except the package itself."""
    return (checkout / ".venv/locked.txt").read_text()


def test_set_up_once(checkout: Path) -> None:
    first = setup(checkout)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "" and "making .venv with Python 3.11.1" in first.stderr
    assert installs(checkout) == ["venv", *OF_THE_LOCK]
    assert "numpy==" in packages(checkout) and "matplotlib==" in packages(checkout)
    assert "mindspore==" not in packages(checkout) and "pytest==" not in packages(checkout)

    second = setup(checkout)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(installs(checkout)) == 4
    assert (checkout / "compiled.txt").read_text() == "-m compileall -q lite_runner\n"


def test_the_former_name_of_the_package_is_uninstalled(checkout: Path) -> None:
    """It is that of another project, whose modules would hide ours."""
    (checkout / "lite_runner.egg-info").mkdir()
    setup(checkout)
    assert (checkout / "removed.txt").read_text() == "-m pip uninstall --yes lite-runner\n"
    assert not (checkout / "lite_runner.egg-info").exists()


def test_progress_while_pip_works(checkout: Path) -> None:
    script = checkout / "scripts/setup.sh"
    text = script.read_text()
    assert "every=20" in text
    script.write_text(text.replace("every=20", "every=0.1"))
    python = python_of("3.11", checkout.parent / "bin/python3.11")
    # The first pip goes on with each step once the one before has been shown, by a pipe of its own:
    # of one for all, a reader may find the writer of the step before, and go on.
    pip = """
    if [ ! -e tell0 ]; then exit 1; fi
    if [ -e first ]; then exit 0; fi
    touch first
    echo "Collecting a==1"; echo "  Downloading a-1.whl"; read answer <tell0
    echo "Building wheels for collected packages: b"; read answer <tell1
    echo "Installing collected packages: a, b, c"; read answer <tell2
"""
    fake = python.read_text().replace('    echo "$* $PIP_CONSTRAINT"', f'{pip}    echo "$*"')
    python.write_text(fake)
    for step in range(3):
        os.mkfifo(checkout / f"tell{step}")
    pins = (checkout / "requirements/lock.txt").read_text().count("==")
    expected = [
        f"set-up: 1 of at most {pins} packages fetched, ",
        "set-up: building packages from source, ",
        "set-up: writing 3 packages, ",
    ]
    environment = {**os.environ, "PYTHON": str(python)}
    with subprocess.Popen(
        ["scripts/setup.sh", "run"],
        cwd=checkout,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for step, line in enumerate(expected):
            while not (shown := process.stderr.readline()).startswith(line):
                assert shown, f"it never showed {line}, ended with {process.wait()}"
            (checkout / f"tell{step}").write_text("on\n")
        assert process.stderr.read().splitlines()[-1].startswith("set-up: done in ")
    assert process.returncode == 0


def test_an_environment_of_tests_serves_jobs_but_not_the_reverse(checkout: Path) -> None:
    setup(checkout, "run")
    setup(checkout, "mindspore")
    assert "mindspore==" in packages(checkout) and "pytest==" not in packages(checkout)
    assert setup(checkout, "run").stderr == ""
    setup(checkout, "dev")
    assert installs(checkout)[4:] == [*OF_THE_LOCK, *OF_THE_LOCK]
    assert packages(checkout) == (checkout / "requirements/lock.txt").read_text()
    assert setup(checkout, "run").stderr == setup(checkout, "mindspore").stderr == ""


def test_a_machine_with_ascend_gets_mindspore_at_once(checkout: Path) -> None:
    python = python_of("3.11", checkout.parent / "bin/python3.11")
    device = {"PYTHON": str(python), "ASCEND_DEVICE": str(python)}
    run("scripts/setup.sh", "run", cwd=checkout, env=device)
    assert "mindspore==" in packages(checkout)


def test_new_pins_update_the_environment(checkout: Path) -> None:
    setup(checkout)
    with (checkout / "requirements/lock.txt").open("a") as lock:
        lock.write("another==1.0\n")
    assert "updating .venv" in setup(checkout).stderr
    assert installs(checkout) == ["venv", *OF_THE_LOCK, *OF_THE_LOCK]


def test_operators_that_changed_are_compiled_again(checkout: Path) -> None:
    setup(checkout)
    with (checkout / "lite_runner/native/src/operators.cc").open("a") as source:
        source.write("// changed\n")
    # The pip of this test compiles nothing, and a missing library is reported.
    done = setup(checkout)
    assert "updating .venv" in done.stderr
    assert "without the operators of lite_runner/native" in done.stderr
    assert setup(checkout).stderr == ""


def test_another_compiler_is_another_try(checkout: Path) -> None:
    setup(checkout)
    done = run("scripts/setup.sh", "run", cwd=checkout, env={"CXX": "another-c++"})
    assert "updating .venv" in done.stderr
    (checkout / "lite_runner/native/operators.so").touch()
    assert "without the operators" not in setup(checkout).stderr


def test_a_moved_checkout_is_installed_again(checkout: Path) -> None:
    setup(checkout)
    moved = checkout.rename(checkout.parent / "moved")
    assert "updating .venv" in setup(moved).stderr


def test_another_python_makes_another_environment(checkout: Path) -> None:
    setup(checkout)
    assert "making .venv with Python 3.12.1" in setup(checkout, version="3.12").stderr
    # without a wish, the one that is there will do
    assert run("scripts/setup.sh", "run", cwd=checkout).stderr == ""


@pytest.mark.parametrize("damage", ["bin/python", "bin", "."])
def test_a_broken_environment_is_made_anew(checkout: Path, damage: str) -> None:
    setup(checkout)
    broken = checkout / ".venv" / damage
    shutil.rmtree(broken) if broken.is_dir() else broken.unlink()
    assert "making .venv" in setup(checkout).stderr
    assert setup(checkout).stderr == ""


def test_a_half_made_environment_is_made_anew(checkout: Path) -> None:
    (checkout / "no-network").write_text("")
    failed = setup(checkout)
    assert failed.returncode == 3
    assert "Could not reach the index" in failed.stderr
    assert "error: installing the packages failed" in failed.stderr and "  -> " in failed.stderr
    (checkout / "no-network").unlink()
    assert "making .venv" in setup(checkout).stderr


def test_a_package_with_another_hash_is_reported(checkout: Path) -> None:
    python = python_of("3.11", checkout.parent / "bin/python3.11")
    message = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    python.write_text(
        python.read_text().replace('    echo "$* $PIP', f'    echo "{message}"; exit 1; echo "')
    )
    failed = run("scripts/setup.sh", "run", cwd=checkout, env={"PYTHON": str(python)})
    assert failed.returncode == 3 and message in failed.stderr
    assert "its SHA-256 is another than in requirements/lock.txt\n  -> " in failed.stderr


def test_a_set_up_that_failed_to_update_is_not_ready(checkout: Path) -> None:
    setup(checkout)
    (checkout / "no-network").write_text("")
    assert setup(checkout, "dev").returncode == 3
    assert setup(checkout, "run").returncode == 3


@pytest.mark.parametrize("version", ["3.9", "3.13", "2.7"])
def test_an_unsupported_python_gets_one_line(checkout: Path, version: str) -> None:
    done = setup(checkout, version=version)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "3.11" in done.stderr and f"python{version} is {version}" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_does_not_run_gets_one_line(checkout: Path) -> None:
    done = run("scripts/setup.sh", "run", cwd=checkout, env={"PYTHON": "/nowhere/python"})
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1 and "/nowhere/python does not run" in done.stderr


def test_python_is_looked_for_in_order(checkout: Path, no_python: dict[str, str]) -> None:
    path = no_python
    folder = Path(path["PATH"])
    assert "none is on PATH" in run("scripts/setup.sh", "run", cwd=checkout, env=path).stderr

    python_of("3.13", folder / "python3")
    done = run("scripts/setup.sh", "run", cwd=checkout, env=path)
    assert done.returncode == 3 and "python3 is 3.13" in done.stderr

    python_of("3.10", folder / "python3.10")
    executable(folder / "python3.11", "exit 127")  # as a shim of a version that is not chosen
    python_of("3.12", folder / "python3.12")
    done = run("scripts/setup.sh", "run", cwd=checkout, env=path)
    assert "with Python 3.12.1" in done.stderr, done.stderr


def test_peers_come_by_their_hashes_but_for_torch(checkout: Path) -> None:
    assert setup(checkout, "peers").returncode == 0
    hashed, torch = installs(checkout)[1:]
    assert "--require-hashes --no-deps" in hashed and "--require-hashes" not in torch
    left = (checkout / ".venv-bench/locked.txt").read_text()
    assert left.startswith("torch==") and left.count("==") == 1
    packages = re.findall(r"^[\w.-]+==.*", (ROOT / "requirements/peers.txt").read_text(), re.M)
    assert [one for one in packages if not one.endswith("\\")] == [left.strip()]


def test_peers_do_not_run_on_3_10(checkout: Path) -> None:
    done = setup(checkout, "peers", version="3.10")
    assert done.returncode == 3 and "accepted: 3.11, 3.12" in done.stderr


def test_lite_has_an_environment_of_its_own(checkout: Path, no_python: dict[str, str]) -> None:
    python_of("3.7", Path(no_python["PATH"]) / "python3.7")
    done = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert done.returncode == 0 and "making .venv-lite with Python 3.7.1" in done.stderr
    assert installs(checkout)[1] == (f"{PIP} --require-hashes --requirement requirements/lite.txt")
    assert run("scripts/setup.sh", "lite", cwd=checkout, env=no_python).stderr == ""
    assert not (checkout / ".venv").exists()


def test_mindformers_has_an_environment_of_its_own(
    checkout: Path, no_python: dict[str, str]
) -> None:
    done = run("scripts/setup.sh", "mindformers", cwd=checkout, env=no_python)
    assert done.returncode == 3 and "MindFormers 1.0.2 needs Python 3.9" in done.stderr
    assert "make mindformers PYTHON39=" in done.stderr
    chosen = python_of("3.9", checkout.parent / "bin/python3.9")
    wish = {**no_python, "PYTHON39": str(chosen), "PYTHON37": "/nowhere", "PYTHON": "/nowhere"}
    done = run("scripts/setup.sh", "mindformers", cwd=checkout, env=wish)
    assert done.returncode == 0 and "making .venv-mindformers with Python 3.9.1" in done.stderr
    [_, command] = installs(checkout)
    assert "--require-hashes" in command and "--requirement requirements/mindformers.txt" in command


def test_lite_takes_a_python_of_pyenv(checkout: Path, no_python: dict[str, str]) -> None:
    executable(Path(no_python["PATH"]) / "python3.7", "exit 127")  # a shim; 3.7 was not chosen
    python_of("3.7", Path(no_python["PYENV_ROOT"]) / "versions/3.7.16/bin/python3.7")
    done = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert done.returncode == 0 and "versions/3.7.16/bin/python3.7" in done.stderr


def test_lite_needs_its_python(checkout: Path, no_python: dict[str, str]) -> None:
    done = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert done.returncode == 3 and not (checkout / ".venv-lite").exists()
    first, second = done.stderr.splitlines()
    assert first == "error: MindSpore Lite needs Python 3.7; none is on PATH, and pyenv has none"
    assert "pyenv install 3.7" in second and "make lite PYTHON37=" in second

    # PYTHON=... of `make test` means the other environment
    chosen = python_of("3.11", checkout.parent / "bin/python3.11")
    done = run("scripts/setup.sh", "lite", cwd=checkout, env={**no_python, "PYTHON37": str(chosen)})
    assert done.returncode == 3 and f"{chosen} is 3.11" in done.stderr
    python_of("3.7", Path(no_python["PATH"]) / "python3.7")
    done = run("scripts/setup.sh", "lite", cwd=checkout, env={**no_python, "PYTHON": str(chosen)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", ["micromamba", "mamba", "conda"])
def test_lite_gets_its_python_from_conda_forge(
    checkout: Path, no_python: dict[str, str], tool: str
) -> None:
    """A stand-in that takes the words of the three tools and makes the environment."""
    python = python_of("3.7", checkout.parent / "source")
    executable(
        Path(no_python["PATH"]) / tool,
        f"""
[ "$*" = "create --yes --quiet --prefix .python3.7/conda --channel conda-forge python=3.7" ] ||
  exit 2
mkdir -p .python3.7/conda/bin; cp {python} .python3.7/conda/bin/python3.7
""",
    )
    done = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert done.returncode == 0, done.stderr
    assert f"getting Python 3.7 with {tool}, into .python3.7" in done.stderr
    assert "making .venv-lite with Python 3.7.1 (.python3.7/conda/bin/python3.7)" in done.stderr
    shutil.rmtree(checkout / ".venv-lite")  # it is got once
    again = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert again.returncode == 0 and "getting" not in again.stderr


def test_lite_gets_its_python_with_uv(checkout: Path, no_python: dict[str, str]) -> None:
    """Through the pip of any Python; where uv finds none either, every try is named."""
    tools = Path(no_python["PATH"])
    executable(tools / "conda", "echo no network; exit 1")
    uv = checkout.parent / "uv"
    executable(
        tools / "python3",
        f"""
case "$*" in
  *version_info*) echo 3.12 ;;
  *"--target .python3.7/uv uv==0.6.17") mkdir -p .python3.7/uv/bin; cp {uv} .python3.7/uv/bin ;;
esac
""",
    )
    executable(uv, "echo no network; exit 1")
    failed = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert failed.returncode == 3 and not (checkout / ".venv-lite").exists()
    log = "got none (log: .python3.7/setup.log)"
    error = next(line for line in failed.stderr.splitlines() if line.startswith("error: "))
    assert error == (
        "error: MindSpore Lite needs Python 3.7; none is on PATH, and pyenv has none; "
        f"conda {log}; uv {log}"
    )
    assert (checkout / ".python3.7/setup.log").read_text() == "no network\n" * 2

    python = python_of("3.7", checkout.parent / "source")
    executable(
        uv,
        f"""
[ "$*" = "python install --install-dir .python3.7 3.7" ] || exit 2
mkdir -p .python3.7/cpython-3.7.9-x/bin; cp {python} .python3.7/cpython-3.7.9-x/bin/python3.7
""",
    )
    done = run("scripts/setup.sh", "lite", cwd=checkout, env=no_python)
    assert done.returncode == 0, done.stderr
    assert "(.python3.7/cpython-3.7.9-x/bin/python3.7)" in done.stderr


def test_tests_go_without_lite_where_there_is_no_python_for_it(
    checkout: Path, no_python: dict[str, str]
) -> None:
    done = run("scripts/setup.sh", "lite", "--optional", cwd=checkout, env=no_python)
    assert done.returncode == 0 and not (checkout / ".venv-lite").exists()
    first, second = done.stderr.splitlines()
    assert first.startswith("set-up: without MindSpore Lite: MindSpore Lite needs Python 3.7; none")
    assert "pyenv install 3.7" in second and "make lite PYTHON37=" in second
    # Anything else that fails is no machine without a Python.
    python_of("3.7", Path(no_python["PATH"]) / "python3.7")
    (checkout / "no-network").write_text("")
    executable(Path(no_python["PATH"]) / "tail", "cat")
    done = run("scripts/setup.sh", "lite", "--optional", cwd=checkout, env=no_python)
    assert done.returncode == 3 and "installing the packages failed" in done.stderr


def test_tests_without_a_network_are_named(checkout: Path, tmp_path: Path) -> None:
    tests = checkout / "tests"
    shutil.rmtree(checkout / "lite_runner")  # else a part of the package that is imported
    shutil.copytree(ROOT / "conf", checkout / "conf")
    tests.mkdir()
    for name in CONFTEST:
        shutil.copy(ROOT / "tests" / name, tests)
    (tests / "test_some.py").write_text(
        "def test_model(smollm2_gguf): pass\n"
        "def test_yaml(mindformers_package): mindformers_package('1.0.2')\n"
        "def test_other(): pass\n"
    )
    env = os.environ | {"PIP_NO_INDEX": "1", "LITE_RUNNER_CACHE": str(tmp_path / "empty")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    done = run(*command, cwd=checkout, env=env)
    assert done.returncode == 0, done.stdout
    report = done.stdout[done.stdout.index("left out: 2 tests, without a network") :]
    names = ["tests/test_some.py::test_model", "tests/test_some.py::test_yaml"]
    assert report.splitlines()[1:3] == names
    done = run(*command, "-m", "not network", cwd=checkout, env=env)
    assert "1 passed, 2 deselected" in done.stdout


def test_tests_that_are_left_out_are_named(checkout: Path, no_python: dict[str, str]) -> None:
    tests = checkout / "tests"
    shutil.rmtree(checkout / "lite_runner")
    tests.mkdir()
    for name in CONFTEST:
        shutil.copy(ROOT / "tests" / name, tests)
    (tests / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('layout', ['a', 'b'])\n"
        "def test_offline(lite_python, layout): pass\n"
        "def test_online(): pass\n"
        "def test_other(): pytest.skip('other')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    done = run(*command, cwd=checkout, env=no_python)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped" in done.stdout
    report = done.stdout[done.stdout.index("left out: 2 tests, without MindSpore Lite") :]
    assert report.splitlines()[1:3] == [
        f"tests/test_some.py::test_offline[{layout}]" for layout in "ab"
    ]
    assert "MindSpore Lite needs Python 3.7; none is on PATH, and pyenv has none" in report
    assert "pyenv install 3.7, or: conda create -n py37 python=3.7; then: make lite" in report


@pytest.mark.parametrize(("target", "name"), MINDFORMERS)
def test_make_mindformers_installs_the_pins_and_they_import(
    request: pytest.FixtureRequest, tmp_path: Path, target: str, name: str
) -> None:
    """Exactly them: a package that nothing pins, or that no pin asks for any more, would come
    or be missing in the next environment. Left out, by name, where it cannot be had."""
    python: Path = request.getfixturevalue(f"{re.sub('[-.]', '_', target)}_python")
    (site,) = python.parents[1].glob("lib/python3.*/site-packages")
    installed = {_normalized(one.name): one.version for one in distributions(path=[str(site)])}
    pins = (ROOT / f"requirements/{target}.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE)
    tools = {"pip", "setuptools"} - {_normalized(one) for one, _ in pinned}
    assert {one: installed[one] for one in installed.keys() - tools} == {
        _normalized(one): version for one, version in pinned
    }
    process = MindFormersProcess(tmp_path, RELEASES[name], threads=1, python=python)
    process.close()
    assert process.versions["mindspore"] == RELEASES[name].mindspore


def _normalized(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()
