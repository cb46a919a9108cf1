"""The bounds of setup.cfg against what is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.errors import EnvironmentFault
from lite_runner.system import packages
from lite_runner.system.packages import PACKAGE, Requirement, code_digest
from tests.each import each

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
    assert packages.unmet() == packages.unmet("serve") == {}
    packages.check()
    packages.check("serve")


def test_a_checkout_and_its_metadata_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = packages.required()
    python, server = packages.required_python(), packages.required("serve")
    monkeypatch.setattr(packages, "_CHECKOUT", Path("/nowhere"))
    installed = packages.required()

    def plain(found: list[Requirement]) -> set[tuple[str, frozenset[str]]]:
        return {(one.name, frozenset(one.bounds.split(","))) for one in found}

    assert len(checkout) > 10
    assert plain(installed) == plain(checkout)  # and none of an extra
    assert plain([packages.required_python()]) == plain([python])
    assert len(server) > 3
    assert {one.name for one in packages.required("serve")} == {one.name for one in server}


@pytest.mark.parametrize(
    ("name", "version"),
    [("numpy", "2.0.0"), ("safetensors", "0.8.0rc1"), ("mindspore", "2.2.0"), ("gguf", "0.9")],
)
def test_another_version_is_refused_with_the_install_line(
    install: Install, name: str, version: str
) -> None:
    install(name, version)
    (wanted,) = packages.unmet()
    with pytest.raises(EnvironmentFault) as caught:
        packages.check()
    assert caught.value.message == f"{name} {version} is installed, expected {wanted.bounds}"
    assert caught.value.hint == f'{sys.executable} -m pip install "{name}{wanted.bounds}"'


def test_all_are_told_at_once(install: Install) -> None:
    install("numpy", "2.1.0")
    install("mindspore", "2.2.0")
    with pytest.raises(EnvironmentFault, match=r"mindspore 2\.2\.0 .*; numpy 2\.1\.0 ") as caught:
        packages.check()
    assert '"mindspore>=2.10,<3" "numpy>=1.25,<2"' in caught.value.hint


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement("no-such-package", ">=1")]
    monkeypatch.setattr(packages, "required", lambda _="": wanted)
    with pytest.raises(EnvironmentFault, match="no-such-package is not installed") as caught:
        packages.check()
    assert caught.value.hint.endswith('pip install "no-such-package>=1"')


def test_a_package_without_a_version_is_not_installed(install: Install) -> None:
    install("filelock", "")
    assert packages.installed("filelock") is None


def test_older_kinds_of_metadata_are_read(install: Install) -> None:
    install("filelock", "3.17", file="PKG-INFO")
    assert packages.installed("filelock") == "3.17"


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
    monkeypatch.setattr(packages, "_CHECKOUT", tmp_path)
    with pytest.raises(EnvironmentFault, match=r"expected a name with|expected python_version"):
        packages.required()


def test_a_requirement_of_other_pythons_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout and from its metadata; and MindSpore, which has none, is no command then."""
    monkeypatch.setattr(packages, "installed", lambda _: None)
    monkeypatch.setattr(sys, "prefix", "/an/environment")
    for place in (packages._CHECKOUT, Path("/nowhere")):
        monkeypatch.setattr(packages, "_CHECKOUT", place)
        for version, numpy, remedy in (
            ((3, 12, 1), ">=1.25,<2", '-m pip install "mindspore'),
            ((3, 13, 0), ">=2.1", "another environment, with Python 3.10 to 3.12"),
        ):
            monkeypatch.setattr(sys, "version_info", version)
            found = packages.required()
            names = [one.name for one in found]
            (bounds,) = (one.bounds for one in found if one.name == "numpy")
            assert set(bounds.split(",")) == set(numpy.split(","))
            assert ("mindspore" in names) == (version < (3, 13))
            with pytest.raises(EnvironmentFault, match="mindspore is not installed") as caught:
                packages.check_mindspore()
            assert remedy in caught.value.hint


def test_the_environment_of_a_checkout_gets_the_pinned_mindspore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", str(packages._CHECKOUT / ".venv"))
    assert packages.mindspore_line() == f"make -C {packages._CHECKOUT} mindspore"


def test_an_extra_of_a_package_is_of_its_requirement(install: Install) -> None:
    install("ray", "2.60.0")
    assert packages.installed("ray[serve]") == "2.60.0"
    (wanted,) = packages.required("ray")
    assert str(wanted).startswith("ray[serve]>=") and wanted.allows("2.60.0")


def test_the_setup_of_another_project_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = other\n")
    monkeypatch.setattr(packages, "_CHECKOUT", tmp_path)
    assert "numpy" in [one.name for one in packages.required()]
    (tmp_path / "setup.cfg").write_text("no section = 1\n")
    assert "numpy" in [one.name for one in packages.required()]


def test_nothing_is_imported_to_look_them_up() -> None:
    look = (
        "import sys; from lite_runner.system import packages; packages.check();"
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


def test_what_is_no_module_does_not_count(package: Path) -> None:
    (package / ".#llama.py").symlink_to("nowhere")
    (package / "networks/__pycache__").mkdir(exist_ok=True)
    (package / "networks/__pycache__/llama.cpython-311.pyc").touch()
    (package / "native/operators.so").touch()
    assert code_digest(package) == code_digest()
