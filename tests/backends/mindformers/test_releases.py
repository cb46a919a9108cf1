"""Which release computes, and in which Python: on an Ascend device that of this one, if any."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lite_runner.backends.mindformers import releases
from lite_runner.backends.mindformers.release import Sizes
from lite_runner.backends.mindformers.release_1_0 import V1_0_2
from lite_runner.backends.mindformers.releases import choose_release, python_for
from lite_runner.errors import ConfigError, EnvironmentFault
from tests.models import reference_model

QWEN2 = reference_model("qwen2")


def install(monkeypatch: pytest.MonkeyPatch, release: str | None) -> None:
    def version(name: str) -> str:
        assert name == "mindformers"
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(releases, "version", version)


def test_on_a_cpu_what_is_installed_here_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, "1.9.0")
    chosen = choose_release(QWEN2, "qwen2", wanted=None, use_past=True)
    assert chosen is V1_0_2
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python))
    assert python_for(chosen, "CPU") == python


def test_on_ascend_the_installed_one_computes_in_this_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "1.9.0")
    chosen = choose_release(QWEN2, "qwen2", wanted=None, use_past=True, device="Ascend")
    assert chosen.name == "1.9.0" and chosen.caches and not chosen.context
    assert python_for(chosen, "Ascend") == Path(sys.executable)
    settings = chosen.model_section(QWEN2, Sizes(2, 40, "float16", use_past=True))["model_config"]
    # Two rows of three blocks of 16, and one beside them.
    assert (settings["is_dynamic"], settings["block_size"], settings["num_blocks"]) == (True, 16, 7)
    assert settings["use_flash_attention"] is True
    assert not {"fused_rms_norm", "use_rope_slice"} & settings.keys()
    without = chosen.model_section(QWEN2, Sizes(2, 40, "float16", use_past=False))["model_config"]
    assert "block_size" not in without


@pytest.mark.parametrize(
    ("installed", "wanted", "expected"),
    [
        ("1.3.2", None, "this Python has mindformers 1.3.2, expected 1.0.2 or 1.9.0"),
        ("1.9.0", "1.0.2", "this Python has mindformers 1.9.0, expected 1.0.2"),
    ],
)
def test_another_one_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: str, wanted: str | None, expected: str
) -> None:
    install(monkeypatch, installed)
    with pytest.raises(EnvironmentFault, match=expected):
        choose_release(QWEN2, "qwen2", wanted=wanted, use_past=True, device="Ascend")


def test_on_ascend_without_one_a_python_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, None)
    chosen = choose_release(QWEN2, "qwen2", wanted="1.9.0", use_past=True, device="Ascend")
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_1_9_PYTHON", str(python))
    assert python_for(chosen, "Ascend") == python


def test_what_none_computes() -> None:
    with pytest.raises(
        ConfigError, match=r"1\.9\.0 cannot compute qwen2: its cache is of operators"
    ):
        choose_release(QWEN2, "qwen2", wanted="1.9.0", use_past=True)
