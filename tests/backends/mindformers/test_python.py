"""The packages that are advised are the ones that are pinned."""

from __future__ import annotations

import pytest

from lite_runner.backends.mindformers.releases import RELEASES
from lite_runner.backends.workers import python as workers
from lite_runner.errors import EnvironmentFault
from tests.paths import ROOT

PINS = {"1.0.2": ["mindformers"], "1.9.0": ["mindformers-1.9", "lock"]}  # requirements/


@pytest.mark.parametrize("name", RELEASES)
def test_the_pins_are_the_ones_that_are_advised(name: str) -> None:
    release = RELEASES[name]
    files = (ROOT / "requirements" / f"{one}.txt" for one in PINS[name])
    pins = {line for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    advised = {word for word in release.python.elsewhere.split() if "==" in word}
    assert {f"mindformers=={name}", f"mindspore=={release.mindspore}"} <= advised <= pins


@pytest.mark.parametrize("name", RELEASES)
def test_the_command_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    python = RELEASES[name].python
    monkeypatch.delenv(python.variable, raising=False)
    monkeypatch.setenv("LITE_RUNNER_CACHE", "/nowhere")
    monkeypatch.setattr(workers, "_CHECKOUT", ROOT / "tests")
    with pytest.raises(EnvironmentFault, match=f"no Python with MindFormers {name}") as caught:
        python.find()
    assert "in a checkout: make mindformers" in caught.value.hint
    assert caught.value.exit_code == 3
