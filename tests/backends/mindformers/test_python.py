"""The packages that are advised are the ones that are pinned."""

from __future__ import annotations

import pytest

from lite_runner.backends.mindformers.python import MINDFORMERS, RELEASE
from lite_runner.backends.workers import python as workers
from lite_runner.errors import EnvironmentFault
from tests.paths import ROOT


def test_the_pins_are_the_ones_that_are_advised() -> None:
    pins = (ROOT / "requirements/mindformers.txt").read_text(encoding="utf-8").splitlines()
    advised = [word for word in MINDFORMERS.elsewhere.split() if "==" in word]
    assert f"mindformers=={RELEASE}" in advised and set(advised) <= set(pins)


def test_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITE_RUNNER_MINDFORMERS_PYTHON", raising=False)
    monkeypatch.setenv("LITE_RUNNER_CACHE", "/nowhere")
    monkeypatch.setattr(workers, "_CHECKOUT", ROOT / "tests")
    with pytest.raises(EnvironmentFault, match=r"no Python with MindFormers 1\.0\.2") as caught:
        MINDFORMERS.find()
    assert "in a checkout: make mindformers" in caught.value.hint
    assert caught.value.exit_code == 3
