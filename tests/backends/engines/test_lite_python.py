"""Where the Lite Python is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.backends.workers import python as module
from lite_runner.errors import EnvironmentFault
from tests.paths import ROOT


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without an environment, an empty cache, no wish."""
    (tmp_path / "checkout/conf").mkdir(parents=True)
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path / "checkout")
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LITE_RUNNER_LITE_PYTHON", raising=False)
    return tmp_path


def test_this_checkout_has_one(lite_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITE_RUNNER_LITE_PYTHON", raising=False)
    assert find_lite_python() == lite_python


def test_the_order(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = program(places / "cache/lite/bin/python")
    assert find_lite_python() == cached
    own = program(places / "checkout/.venv-lite/bin/python")
    assert find_lite_python() == own
    chosen = program(places / "chosen/python")
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(chosen))
    assert find_lite_python() == chosen


def test_an_installed_package_is_no_checkout(places: Path) -> None:
    program(places / "checkout/.venv-lite/bin/python")
    (places / "checkout/conf").rmdir()
    with pytest.raises(EnvironmentFault, match=r"cache/lite/bin/python not found"):
        find_lite_python()


def test_there_is_none(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"\.venv-lite/bin/python and .* not found"
    ) as caught:
        find_lite_python()
    assert "make lite" in caught.value.hint and "mindspore-lite==2.0.0" in caught.value.hint
    program(places / "checkout/.venv-lite/bin/python").chmod(0o644)
    with pytest.raises(EnvironmentFault, match="not found"):
        find_lite_python()
    for wrong in (places / "nowhere", places):
        monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(wrong))
        with pytest.raises(EnvironmentFault, match=f"LITE_RUNNER_LITE_PYTHON={wrong}"):
            find_lite_python()


def test_the_pin_is_the_one_that_is_advised() -> None:
    pins = (ROOT / "requirements/lite.txt").read_text()
    assert "mindspore-lite==2.0.0\n" in pins
