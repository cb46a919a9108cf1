"""All checks on this machine, in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lite_runner import native
from lite_runner.backends.lite.engines import lite
from lite_runner.backends.lite.engines.lite_release import LITE
from lite_runner.backends.mindformers.releases import RELEASES
from lite_runner.backends.workers import python as workers
from lite_runner.config.parallel import SOCKET_VARIABLE
from lite_runner.doctor import machine, probe
from lite_runner.doctor.check import Check, Finding
from lite_runner.system import environment, memory
from lite_runner.system.environment import Requirement
from tests.paths import ROOT

PROGRAM = """
import sys
from pathlib import Path
from lite_runner.app import guarded
def run():
    from lite_runner.doctor import machine
    return 0 if machine.run(machine.machine_checks(Path("outputs"), None), sys.argv[1]) else 3
sys.exit(guarded(run))
"""


def started(tmp_path: Path, form: str) -> subprocess.Popen[str]:
    """The doctor, with its temporary files in tmp_path/tmp."""
    (tmp_path / "tmp").mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(program), form],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def left(tmp_path: Path) -> list[psutil.Process]:
    """Ranks, or their launchers, that are still alive."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(SOCKET_VARIABLE, "").startswith(str(tmp_path)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_whole_on_this_machine(tmp_path: Path) -> None:
    with started(tmp_path, "json") as process:
        output, errors = process.communicate()
    document = json.loads(output)
    status = {check["name"]: check["status"] for check in document["checks"]}
    for name in ("python", "numpy", "import mindspore", "memory", "port", "msrun"):
        assert status[name] == "ok", document
    assert document["ok"] is ("fail" not in status.values())
    assert (process.returncode, errors) == (0 if document["ok"] else 3, "")
    assert {one.name for one in tmp_path.iterdir()} == {"tmp", "program.py"}  # no run folder
    assert list((tmp_path / "tmp").iterdir()) == []
    assert left(tmp_path) == []


def test_ctrl_c_ends_it_with_what_there_is_and_leaves_no_rank(tmp_path: Path) -> None:
    with started(tmp_path, "text") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = ""
        while "\nok    port " not in output:  # the next check starts ranks
            line = process.stdout.readline()
            assert line, output
            output += line
        while not left(tmp_path):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert (process.returncode, rest) == (130, "")
    assert errors.endswith("interrupted\n")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert left(tmp_path) == []


def test_this_machine_has_a_processor_and_memory() -> None:
    assert machine.cpu().status == "ok"
    assert f" of {os.cpu_count()} cores" in machine.cpu().found
    assert machine.cpu().found.endswith(" ".join(environment.processor_features()))
    assert machine.main_memory().status == "ok"


def test_a_cpu_quota_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpu_quota", lambda: 1.5)
    assert f"1 of {os.cpu_count()} cores (CPU quota of the cgroup: 1.5)" in machine.cpu().found


def test_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10 << 20)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    found = machine.main_memory()
    assert found.status == "fail"
    assert found.found.startswith("MindSpore alone needs 461.4 MB")
    assert "10.5 MB is free" in found.found
    assert found.remedy


def test_too_few_addresses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_addresses", lambda: 1 << 30)
    found = machine.main_memory()
    assert found.status == "fail"
    assert "ulimit -v leaves 1.1 GB" in found.found
    assert "ulimit -v unlimited" in found.remedy


def test_a_sufficient_address_space_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_addresses", lambda: 64 << 30)
    assert machine.main_memory().found.endswith("ulimit -v leaves 68.7 GB of address space")


def test_no_ascend_device_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 0)
    assert machine.ascend().status == "ok"


def test_ascend_devices_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 8)
    monkeypatch.setattr(probe, "ask", lambda question, timeout: "Ascend910B3")
    assert machine.ascend().found == "8 x Ascend910B3"


def test_ascend_devices_without_cann_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 8)
    found = Check("ascend", machine.ascend).finding()
    assert found.status == "fail"
    assert "CANN cannot be loaded" in found.found
    assert "set_env.sh" in found.remedy


def test_an_output_folder_is_not_made(tmp_path: Path) -> None:
    found = machine.output_disk(tmp_path / "a" / "b")
    assert found.status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_fails() -> None:
    found = machine.output_disk(Path("/proc/self/outputs"))
    assert found.status == "fail"
    assert "/proc/self/outputs: cannot be written: " in found.found
    assert found.remedy.startswith("output_dir=")


def test_a_file_in_the_way_fails(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    found = machine.output_disk(tmp_path / "outputs" / "more")
    assert found.status == "fail"
    assert found.found.endswith(f"{tmp_path}/outputs is a file")


def test_a_link_to_nowhere_fails(tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(tmp_path / "gone")
    found = machine.output_disk(tmp_path / "outputs")
    assert found.status == "fail"
    assert f"is a link to {tmp_path}/gone, which does not exist" in found.found


def test_a_folder_called_latest_fails(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    found = machine.output_disk(tmp_path)
    assert found.status == "fail"
    assert found.remedy == f"mv {tmp_path}/latest {tmp_path}/latest-old"


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage(10, 5, 5 * 10**6))
    found = machine.output_disk(tmp_path)
    assert (found.status, found.expected) == ("warn", "1.0 GB")
    assert "5.0 MB free" in found.found


def test_a_cache_that_cannot_be_written_is_a_warning() -> None:
    found = machine.cache_disk(Path("/proc/self/cache"))
    assert found.status == "warn"
    assert "LITE_RUNNER_CACHE" in found.remedy


def test_a_folder_that_cannot_be_looked_at_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    found = Check("disk", lambda: machine.output_disk(Path("/closed"))).finding()
    assert found.status == "fail"
    assert "Permission denied" in found.found


NUMPY = Requirement("numpy", ">=1.25,<2")


def test_each_package_of_setup_cfg_has_a_check() -> None:
    checks = list(machine.requirement_checks())
    assert [check.name for check in checks][1:] == [one.name for one in environment.required()]
    assert {check.finding().status for check in checks} == {"ok"}


def test_another_version_fails_with_the_line_that_installs_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = {"numpy": "2.0.0", "mindspore": "2.2.0"}
    real = environment.installed
    monkeypatch.setattr(environment, "installed", lambda name: has.get(name) or real(name))
    found = machine.package(NUMPY)
    assert (found.status, found.found, found.expected) == ("fail", "2.0.0", ">=1.25,<2")
    line = f'{sys.executable} -m pip install "mindspore>=2.10,<3" "numpy>=1.25,<2"'
    assert found.remedy == line


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda name: None)
    found = machine.package(Requirement("jinja2", ""))
    assert (found.status, found.found, found.expected) == ("fail", "not installed", "any version")


def test_another_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.14.1")
    found = machine.python_version()
    assert (found.status, found.expected) == ("fail", ">=3.10,<3.14")
    assert "3.14.1" in found.found
    assert "python3.11 -m venv" in found.remedy


def test_nothing_required_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "required", list)
    _, unknown = machine.requirement_checks()
    assert unknown.finding().status == "warn"


def test_an_empty_cache(tmp_path: Path) -> None:
    assert machine.cached(tmp_path / "graphs") == Finding("ok", "empty")
    (tmp_path / "graphs").mkdir()
    assert machine.cached(tmp_path / "graphs") == Finding("ok", "empty")


def test_the_command_that_empties_it_names_what_is_there(tmp_path: Path) -> None:
    hub, environment = tmp_path / "the hub", tmp_path / "pypi"
    hub.mkdir()
    (hub / "weights").write_bytes(bytes(2_000_000))
    found = machine.cached(hub, environment)
    assert found.status == "ok"
    assert found.found == f"2.0 MB in {hub}"
    assert found.remedy == f"to empty it: rm -r '{hub}'"


def test_usage_of_the_cache_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path))
    assert (
        machine.cache_size("10GB").found
        == "0 B of 10GB for packed layers, prefixes, compiled graphs and exports"
    )
    for name in ("graphs", "artifacts", "hub"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1_000_000))
    assert (
        machine.cache_size("10GB").found
        == "2.0 MB of 10GB for packed layers, prefixes, compiled graphs and exports"
    )


def test_mindspore_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda name: None)
    (mindspore,) = (one for one in environment.required() if one.name == "mindspore")
    found = machine.package(mindspore)
    assert found.status == "warn"
    assert found.found.startswith("not installed: backend=native alone computes")
    assert found.remedy == environment.mindspore_line()
    monkeypatch.setattr(machine.sys, "prefix", "/an/environment")  # which make has not made
    assert '"mindspore>=2.10,<3" "numpy>=1.25,<2"' in environment.mindspore_line()
    names = {check.name for check in machine.machine_checks(tmp_path)}
    assert names.isdisjoint({"import mindspore", "msrun"})


def test_mindspore_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspore.py").write_text("raise ImportError('libfoo.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = Check("mindspore", machine.mindspore).finding()
    assert found.status == "fail"
    assert "importing it fails: libfoo.so: no such file" in found.found
    assert found.remedy.endswith('--force-reinstall --no-deps "mindspore>=2.10,<3"')


def test_operators_that_were_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "operators.so")
    found = machine.operators()
    assert found.status == "warn"
    assert "they were not built" in found.found
    assert "install a C++ compiler" in found.remedy


def test_operators_of_other_sources(other_operators: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", other_operators)
    found = machine.operators()
    assert found.status == "warn"
    assert "built from other sources" in found.found
    assert "build_ext --inplace" in found.remedy


def test_operators_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ask", lambda question, timeout: "portable")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    assert machine.operators().status == "warn"
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.operators().status == "ok"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_no_compiler_matters_only_where_operators_are_not_built(
    no_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.cxx() == Finding("ok", "no C++ compiler")
    monkeypatch.setattr(native, "LIBRARY", no_compiler / "operators.so")
    found = machine.cxx()
    assert found.status == "warn"
    assert "install g++" in found.remedy


def test_the_compiler_that_is_asked_for_is_tried(no_compiler: Path) -> None:
    compiler = no_compiler / "g++"
    compiler.write_text("#!/bin/sh\necho 'g++ 12.2'\n")
    compiler.chmod(0o755)
    assert machine.cxx() == Finding("ok", "g++: g++ 12.2")
    compiler.write_text("#!/bin/sh\necho 'no cc1plus' >&2\nexit 1\n")
    assert machine.cxx() == Finding("warn", "g++ does not run\nno cc1plus", remedy="set CXX")


def test_a_compiler_that_is_not_there(no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "icpx -O1")
    found = Check("compiler", machine.cxx).finding()
    assert found.status == "fail"
    assert "icpx: cannot be started" in found.found


def test_no_lite_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LITE.variable, "/nowhere/python")
    found = machine.mindspore_lite()
    assert found.status == "warn"
    assert "/nowhere/python: not an executable" in found.found
    assert "engine=graph-cell" in found.found


def test_a_python_without_lite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LITE.variable, sys.executable)
    found = machine.mindspore_lite()
    assert found.status == "fail"
    assert "No module named 'mindspore_lite'" in found.found


def test_lite_in_a_worker(lite_python: Path) -> None:
    found = machine.mindspore_lite()
    assert found.status == "ok"
    assert "in a worker: " in found.found


def test_lite_in_this_python_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lite, "available", lambda: True)
    (tmp_path / "mindspore_lite.py").write_text("__version__ = '2.7.0'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine.mindspore_lite() == Finding("ok", "MindSpore Lite 2.7.0, in this Python")


Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """`program("1.9.0", "echo 1.9.0 2.10.0")`: what the Python of a release does; else none is."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", "/nowhere")
    monkeypatch.setattr(workers, "_CHECKOUT", ROOT / "tests")
    for release in RELEASES.values():
        monkeypatch.delenv(release.python.variable, raising=False)

    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv(RELEASES[name].python.variable, str(path))

    return put


def look(*, needed: bool) -> Finding:
    return Check("mindformers", lambda: machine.mindformers(needed=needed)).finding()


@pytest.mark.usefixtures("program")
def test_none_is_a_failure_only_where_it_is_asked_for() -> None:
    found = look(needed=False)
    assert (found.status, found.found) == (
        "ok",
        "no 1.0.2; no 1.9.0 (for backend=mindformers alone)",
    )
    assert "in a checkout: make mindformers" in found.remedy
    assert look(needed=True).status == "fail"


def test_both(program: Program, tmp_path: Path) -> None:
    program("1.0.2", "echo 1.0.2 2.0.0")
    program("1.9.0", "echo 1.9.0 2.10.0")
    found = look(needed=True)
    assert (found.status, found.remedy) == ("ok", "")
    assert f"1.9.0 on mindspore 2.10.0, in a worker: {tmp_path / '1.9.0'}" in found.found


@pytest.mark.parametrize(
    ("text", "has"),
    [("echo 1.3.2 2.10.0", "1.3.2 on mindspore 2.10.0"), ("exit 1", "no MindFormers")],
)
def test_one_that_is_broken(program: Program, text: str, has: str) -> None:
    program("1.9.0", text)
    found = look(needed=False)
    assert found.status == "fail" and f"has {has}" in found.found
    assert found.remedy == "make mindformers"
