"""Settings of an Ascend card, as calls of a MindSpore that records them. No card is here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest

from lite_runner import profiler
from lite_runner.backends.mindspore import device
from lite_runner.config.sections import AscendSettings
from lite_runner.errors import ConfigError
from lite_runner.launch import operators_profiled
from lite_runner.system import environment


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Recorded calls of MindSpore."""
    calls: list[tuple[str, Any]] = []
    precision = ms.device_context.ascend.op_precision
    monkeypatch.setattr(ms, "set_device", lambda *given: calls.append(("device", given)))
    monkeypatch.setattr(ms, "set_context", lambda **given: calls.append(("context", given)))
    monkeypatch.setattr(ms.runtime, "set_memory", lambda **given: calls.append(("memory", given)))
    monkeypatch.setattr(precision, "precision_mode", lambda mode: calls.append(("precision", mode)))
    monkeypatch.setattr(environment, "ascend_soc", lambda: "Ascend910B3")
    monkeypatch.setattr(environment, "ascend_devices", lambda: 8)
    monkeypatch.setattr(device, "_chosen", AscendSettings())
    monkeypatch.setattr(device, "_applied", AscendSettings())
    for name in device.DEFAULTS:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    return calls


def test_ascend_settings_are_applied_once_for_the_card(calls: list[tuple[str, Any]]) -> None:
    settings = AscendSettings("58GB", {"precision_mode": "force_fp32", "jit_compile": True})
    device.choose_device("Ascend", settings)
    assert os.environ["MS_ALLOC_CONF"] == "enable_vmm:False" and not calls
    assert os.environ["MS_ENABLE_LCCL"] == "off"
    device.set_device("Ascend", 3)
    assert [call for call in calls if "jit_config" not in call[1]] == [
        ("device", ("Ascend", 3)),
        ("memory", {"max_size": "58GB"}),
        ("precision", "force_fp32"),
        ("context", {"ascend_config": {"jit_compile": True}}),
    ]
    calls.clear()
    device.choose_device("Ascend", settings)
    device.set_device("Ascend", 3)
    assert [call[0] for call in calls if "jit_config" not in call[1]] == ["device"]


def test_nothing_is_set_that_was_not_asked_for(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"MS_ALLOC_CONF": "enable_vmm:True", "MS_ENABLE_LCCL": "on"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert device.choose_device("Ascend", AscendSettings()) == "Ascend"
    device.apply_ascend_settings()
    assert not calls and {name: os.environ[name] for name in own} == own
    settings = AscendSettings(ascend_config={"jit_compile": True})
    assert device.choose_device("CPU", settings) == "CPU"
    device.apply_ascend_settings()
    assert not calls
    assert settings.no_effect("CPU") == "context (ascend_config): for Ascend; this runs on CPU"
    assert settings.no_effect("Ascend") == AscendSettings().no_effect("CPU") == ""


def test_settings_that_mindspore_refuses(
    calls: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def late(**given: Any) -> None:
        raise RuntimeError("The 'set_memory' can not be set repeatedly.")

    def refuse(**given: Any) -> None:
        raise ValueError("the value must be one of [True, False]\nand more")

    monkeypatch.setattr(ms.runtime, "set_memory", late)
    device.choose_device("Ascend", AscendSettings("58GB", {"jit_compile": 3}))
    monkeypatch.setattr(ms, "set_context", refuse)
    with pytest.raises(ConfigError, match=r"context\.ascend_config: the value must be one of"):
        device.apply_ascend_settings()
    assert "context.max_device_memory=58GB has no effect" in capsys.readouterr().err


def test_operators_are_profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of a run that fails."""
    calls: list[str] = []

    class Recording:
        def __init__(self, output_path: str) -> None:
            calls.append(output_path)

        def analyse(self) -> None:
            calls.append("analyse")

    monkeypatch.setattr(ms, "Profiler", Recording)
    with pytest.raises(KeyboardInterrupt), device.profiled(tmp_path):
        raise KeyboardInterrupt
    assert calls == [str(tmp_path), "analyse"]
    for records, name, more in ((False, "ms", 0), (True, "native", 0), (True, "ms", 2)):
        before = len(calls)
        if records:
            profiler.start()
        try:
            with operators_profiled(name, tmp_path):
                pass
        finally:
            profiler.stop()
        assert len(calls) - before == more, name
    assert calls[2:] == [str(tmp_path / "mindspore_profile"), "analyse"]
