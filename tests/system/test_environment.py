"""Packages against setup.cfg's bounds; device numbers of a machine, a container, a process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lite_runner.errors import EnvironmentFault
from lite_runner.system import environment
from lite_runner.system.environment import (
    PACKAGE,
    VISIBLE,
    Requirement,
    code_digest,
    index_of,
    physical_ids,
    seen_ids,
    visible_devices,
)
from tests.each import each
from tests.paths import ROOT

FACTS = yaml.safe_load((ROOT / "tests/ascend/ranks.yaml").read_text())
MACHINE = list(range(8))
CONTAINER = [4, 5, 6, 7]


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    shown = list(MACHINE)
    monkeypatch.setattr(environment, "physical_ids", lambda: shown)
    return shown


def test_the_driver_shows_devices_and_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"/dev/davinci{name}" for name in ("10", "2", "_manager", "0")]
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: paths)
    assert physical_ids() == [0, 2, 10]


@pytest.mark.parametrize(
    ("value", "expected"),
    [*FACTS["ASCEND_RT_VISIBLE_DEVICES"]["examples"].items(), ("x", []), ("", MACHINE)],
)
def test_devices_that_a_process_sees(
    shows: list[int], monkeypatch: pytest.MonkeyPatch, value: str, expected: list[int]
) -> None:
    assert seen_ids({VISIBLE: value}) == expected
    monkeypatch.setenv(VISIBLE, value)
    assert environment.ascend_devices() == len(expected)


@pytest.mark.parametrize(
    ("shown", "ids", "before", "visible", "indices"),
    [
        (MACHINE, [4, 5, 6, 7], "", "4,5,6,7", [0, 1, 2, 3]),
        (MACHINE, [4, 5, 6, 7], "4,5,6,7", "4,5,6,7", [0, 1, 2, 3]),
        (MACHINE, [2, 3], "0,1,2,3", "2,3", [0, 1]),
        # Only ascending numbers are documented, and ranks may lie otherwise.
        (MACHINE, [6, 4, 7], "", "4,6,7", [1, 0, 2]),
        (CONTAINER, [4, 5, 6, 7], "", "0,1,2,3", [0, 1, 2, 3]),
        (CONTAINER, [5, 7], "", "1,3", [0, 1]),
    ],
)
def test_from_a_rank_table_to_set_device(
    shows: list[int],
    shown: list[int],
    ids: list[int],
    before: str,
    visible: str,
    indices: list[int],
) -> None:
    shows[:] = shown
    given = {VISIBLE: before} if before else {}
    assert visible_devices(ids, given) == visible
    assert [index_of(device_id, {VISIBLE: visible}) for device_id in ids] == indices


def test_a_device_that_is_not_there(shows: list[int]) -> None:
    with pytest.raises(EnvironmentFault, match="hides device 5 of the rank table") as caught:
        visible_devices([4, 5], {VISIBLE: "3,4"})
    assert f"unset {VISIBLE}" in caught.value.hint
    shows[:] = CONTAINER
    with pytest.raises(EnvironmentFault, match="device 0,1 for this machine, which shows 4,5,6,7"):
        visible_devices([0, 1, 4], {})
    shows.clear()
    with pytest.raises(EnvironmentFault, match="which shows none"):
        index_of(0, {})


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install("numpy", "2.0.0")` puts the metadata of a package before the real one."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, version: str, *lines: str, file: str = "METADATA") -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        head = ["Metadata-Version: 2.1", f"Name: {name}", *lines]
        head += [f"Version: {version}"] if version else []
        (folder / file).write_text("\n".join([*head, "", "Version: 0 of the description"]))

    return put


def test_this_python_meets_them_all() -> None:
    assert environment.unmet() == environment.unmet("serve") == {}
    environment.check_packages()
    environment.check_packages("serve")


def test_a_checkout_and_its_metadata_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = environment.required()
    python, server = environment.required_python(), environment.required("serve")
    monkeypatch.setattr(environment, "_CHECKOUT", Path("/nowhere"))
    installed = environment.required()

    def plain(found: list[Requirement]) -> set[tuple[str, frozenset[str]]]:
        return {(one.name, frozenset(one.bounds.split(","))) for one in found}

    assert len(checkout) > 10
    assert plain(installed) == plain(checkout)  # and none of an extra
    assert plain([environment.required_python()]) == plain([python])
    assert len(server) > 3
    assert {one.name for one in environment.required("serve")} == {one.name for one in server}


@pytest.mark.parametrize(
    ("name", "version"),
    [("numpy", "2.0.0"), ("safetensors", "0.8.0rc1"), ("mindspore", "2.2.0"), ("gguf", "0.9")],
)
def test_another_version_is_refused_with_the_install_line(
    install: Install, name: str, version: str
) -> None:
    install(name, version)
    (wanted,) = environment.unmet()
    with pytest.raises(EnvironmentFault) as caught:
        environment.check_packages()
    assert caught.value.message == f"{name} {version} is installed, expected {wanted.bounds}"
    assert caught.value.hint == f'{sys.executable} -m pip install "{name}{wanted.bounds}"'


def test_all_errors_are_reported_at_once(install: Install) -> None:
    install("numpy", "2.1.0")
    install("mindspore", "2.2.0")
    with pytest.raises(EnvironmentFault, match=r"mindspore 2\.2\.0 .*; numpy 2\.1\.0 ") as caught:
        environment.check_packages()
    assert '"mindspore>=2.10,<3" "numpy>=1.25,<2"' in caught.value.hint


def test_missing_parts_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement("no-such-package", ">=1")]
    monkeypatch.setattr(environment, "required", lambda _="": wanted)
    with pytest.raises(EnvironmentFault, match="no-such-package is not installed") as caught:
        environment.check_packages()
    assert caught.value.hint.endswith('pip install "no-such-package>=1"')


def test_a_package_without_a_version_is_not_installed(install: Install) -> None:
    install("filelock", "")
    assert environment.installed("filelock") is None


def test_older_kinds_of_metadata_are_read(install: Install) -> None:
    install("filelock", "3.17", file="PKG-INFO")
    assert environment.installed("filelock") == "3.17"


@each(
    ("bounds", "version", "allowed"),
    [
        (">=2.10,<3", "2.10.0", True),
        (">=2.10,<3", "2.10.0+cann8", True),
        (">=2.10,<3", "2.9.9", False),
        (">=2.10,<3", "3.0.0rc1", False),
        ("<2,>=1.25", "1.25", True),
        (">=1.25,<2", "2", False),
        (">=6", "6.0.0", True),
        ("", "anything 1", False),
        ("", "1", True),
        (">=1", "unknown", False),
    ],
)
def test_bounds(bounds: str, version: str, allowed: bool) -> None:
    assert Requirement("one", bounds).allows(version) is allowed


@pytest.mark.parametrize("text", ["numpy ~= 1.25", "a; sys_platform == 'linux'", "b[c >= 1"])
def test_a_requirement_that_would_be_misread_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    config = (
        f"[metadata]\nname = mindspore-lite-runner\n[options]\ninstall_requires =\n    {text}\n"
    )
    (tmp_path / "setup.cfg").write_text(config)
    monkeypatch.setattr(environment, "_CHECKOUT", tmp_path)
    with pytest.raises(EnvironmentFault, match=r"expected a name with|expected python_version"):
        environment.required()


def test_a_requirement_of_other_pythons_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout and from its metadata; and MindSpore, which has none, is no command then."""
    monkeypatch.setattr(environment, "installed", lambda _: None)
    monkeypatch.setattr(sys, "prefix", "/an/environment")
    for place in (environment._CHECKOUT, Path("/nowhere")):
        monkeypatch.setattr(environment, "_CHECKOUT", place)
        for version, numpy, remedy in (
            ((3, 12, 1), ">=1.25,<2", '-m pip install "mindspore'),
            ((3, 13, 0), ">=2.1", "another environment, with Python 3.10 to 3.12"),
        ):
            monkeypatch.setattr(sys, "version_info", version)
            found = environment.required()
            names = [one.name for one in found]
            (bounds,) = (one.bounds for one in found if one.name == "numpy")
            assert set(bounds.split(",")) == set(numpy.split(","))
            assert ("mindspore" in names) == (version < (3, 13))
            with pytest.raises(EnvironmentFault, match="mindspore is not installed") as caught:
                environment.check_mindspore()
            assert remedy in caught.value.hint


def test_the_environment_of_a_checkout_gets_the_pinned_mindspore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", str(environment._CHECKOUT / ".venv"))
    assert environment.mindspore_line() == f"make -C {environment._CHECKOUT} mindspore"


def test_an_extra_of_a_package_is_of_its_requirement(install: Install) -> None:
    install("ray", "2.60.0")
    assert environment.installed("ray[serve]") == "2.60.0"
    (wanted,) = environment.required("ray")
    assert str(wanted).startswith("ray[serve]>=") and wanted.allows("2.60.0")


def test_the_setup_of_another_project_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = other\n")
    monkeypatch.setattr(environment, "_CHECKOUT", tmp_path)
    assert "numpy" in [one.name for one in environment.required()]
    (tmp_path / "setup.cfg").write_text("no section = 1\n")
    assert "numpy" in [one.name for one in environment.required()]


def test_nothing_is_imported_to_look_them_up() -> None:
    look = (
        "import sys; from lite_runner.system import environment; environment.check_packages();"
        "print([name for name in ('numpy', 'mindspore', 'yaml', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_another_mindspore_ends_a_run_before_it_is_imported(
    install: Install, tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    install("mindspore", "2.2.0")
    arguments = ["model=tiny_llama", "load_checkpoint=random", "predict_data=hello"]
    done = cli(*arguments, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert "mindspore 2.2.0 is installed, expected >=2.10,<3" in done.stderr
    assert '-m pip install "mindspore>=2.10,<3"' in done.stderr
    assert not (tmp_path / "outputs").exists()


def added(package: Path) -> None:
    (package / "architectures/new.py").touch()


def changed(package: Path) -> None:
    with (package / "networks/decoder.py").open("a") as file:
        file.write("\n")


def moved(package: Path) -> None:
    (package / "networks/decoder.py").rename(package / "decoder.py")


def renamed(package: Path) -> None:
    (package / "networks").rename(package / "cells")


def removed(package: Path) -> None:
    (package / "backends/lite/engines/lite.py").unlink()


def swapped(package: Path) -> None:
    decoder, lora = package / "networks/decoder.py", package / "networks/lora.py"
    texts = decoder.read_bytes(), lora.read_bytes()
    lora.write_bytes(texts[0])
    decoder.write_bytes(texts[1])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of this package's source."""
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


@pytest.mark.parametrize("change", [added, changed, moved, renamed, removed, swapped])
def test_a_change_of_the_code_is_seen(package: Path, change: Callable[[Path], None]) -> None:
    assert code_digest(package) == code_digest()  # wherever it lies
    change(package)
    code_digest.cache_clear()
    assert code_digest(package) != code_digest()


def test_other_files_than_modules_do_not_count(package: Path) -> None:
    (package / ".#llama.py").symlink_to("nowhere")
    (package / "networks/__pycache__").mkdir(exist_ok=True)
    (package / "networks/__pycache__/llama.cpython-311.pyc").touch()
    (package / "native/operators.so").touch()
    assert code_digest(package) == code_digest()


def test_one_of_intel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Xeon 6\nflags\t\t: fpu avx avx2 avx512_vnni\n\n"
        "processor\t: 1\nmodel name\t: other\nflags\t\t: sve\n"
    )
    monkeypatch.setattr(environment, "_CPUINFO", info)
    assert environment.processor() == "Xeon 6"
    assert environment.processor_features() == ["avx2", "avx512_vnni"]


@pytest.mark.parametrize(
    ("vendor", "flags", "pairs"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("AuthenticAMD", "avx512f", False),
    ],
)
def test_one_that_multiplies_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, pairs: bool
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    monkeypatch.setattr(environment, "_CPUINFO", info)
    assert environment.multiplies_pairs() is pairs


def test_one_of_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    monkeypatch.setattr(environment, "_CPUINFO", info)
    assert environment.processor() == platform.machine()
    assert environment.processor_features() == ["asimddp", "i8mm"]


def test_one_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_CPUINFO", Path("/nowhere"))
    assert (environment.processor(), environment.processor_features()) == (platform.machine(), [])
    assert environment.cores() == len(os.sched_getaffinity(0))


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("cpu_", "cpu.")).write_text(content)


def test_version_2(mount: Path) -> None:
    assert environment.cpu_quota() is None
    write(mount / "job/step", cpu_max="max 100000\n")
    assert environment.cpu_quota() is None
    write(mount / "other", cpu_max="10000 100000\n")
    write(mount / "job", cpu_max="250000 100000\n")  # a parent's limit counts too
    assert environment.cpu_quota() == 2.5
    write(mount / "job/step", cpu_max="75000 50000\n")
    assert environment.cpu_quota() == 1.5


def test_version_1(mount: Path) -> None:
    write(mount / "cpu/job/step", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert environment.cpu_quota() is None
    write(mount / "cpu", cpu_cfs_quota_us="300000\n", cpu_cfs_period_us="100000\n")
    assert environment.cpu_quota() == 3


def test_as_many_threads_as_whole_cpus(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    expected = {"max": 8, "1600000": 8, "250000": 2, "100000": 1, "5000": 1}
    for quota, cores in expected.items():
        write(mount, cpu_max=f"{quota} 100000\n")
        assert environment.cores() == cores, quota
