"""Interpreter and packages in a world that lite-runner does not run in."""

from __future__ import annotations

import sys

import pytest

from lite_runner.doctor import requirements
from lite_runner.system import packages
from lite_runner.system.packages import Requirement

NUMPY = Requirement("numpy", ">=1.25,<2")


def test_each_package_of_setup_cfg_has_a_check() -> None:
    checks = list(requirements.checks())
    assert [check.name for check in checks][1:] == [one.name for one in packages.required()]
    assert {check.finding().status for check in checks} == {"ok"}


def test_another_version_fails_with_the_line_that_installs_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = {"numpy": "2.0.0", "mindspore": "2.2.0"}
    real = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: has.get(name) or real(name))
    found = requirements.package(NUMPY)
    assert (found.status, found.found, found.expected) == ("fail", "2.0.0", ">=1.25,<2")
    line = f'{sys.executable} -m pip install "mindspore>=2.10,<3" "numpy>=1.25,<2"'
    assert found.remedy == line


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: None)
    found = requirements.package(Requirement("jinja2", ""))
    assert (found.status, found.found, found.expected) == ("fail", "not installed", "any version")


def test_another_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.platform, "python_version", lambda: "3.13.1")
    found = requirements.python()
    assert (found.status, found.expected) == ("fail", ">=3.10,<3.13")
    assert "3.13.1" in found.found
    assert "python3.11 -m venv" in found.remedy


def test_where_nothing_is_required_that_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "required", list)
    _, unknown = requirements.checks()
    assert unknown.finding().status == "warn"
