"""Models that are broken, missing, or too large for the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.doctor import model
from lite_runner.doctor.check import Finding
from lite_runner.run_modes import heads, resolve
from lite_runner.system import memory


def config_of(*arguments: str) -> RunConfig:
    return resolve(parse(["run_mode=doctor", *arguments], heads()))[0]


def findings(*arguments: str) -> dict[str, Finding]:
    checks = model.checks(config_of(*arguments))
    return {check.name: check.finding() for check in checks}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))


def test_a_whole_model(write_tiny_llama: Callable[..., Path]) -> None:
    folder = write_tiny_llama("model")
    found = findings(f"load_checkpoint={folder}", "model=tiny_llama")
    assert [one.status for one in found.values()] == ["ok", "ok", "ok"]
    assert found["model files"].found.endswith(" tensors, none missing")
    assert "the built-in byte tokenizer: 259 tokens" in found["tokenizer"].found
    assert "x 33 tokens (weights 509.2 kB" in found["model memory"].found


def test_a_file_that_was_cut_short(write_tiny_llama: Callable[..., Path]) -> None:
    folder = write_tiny_llama("model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = findings(f"load_checkpoint={folder}", "model=tiny_llama")["model files"]
    assert found.status == "fail"
    assert str(weights) in found.found


def test_a_tensor_of_another_shape(write_tiny_llama: Callable[..., Path]) -> None:
    folder = write_tiny_llama("model", {"vocab_size": 300})
    (folder / "config.json").unlink()
    found = findings(f"load_checkpoint={folder}", "model=tiny_llama")["model files"]
    assert found.status == "fail"
    assert "300" in found.found


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    found = findings("model=auto", f"load_checkpoint={tmp_path}/none")
    assert {one.status for one in found.values()} == {"fail"}
    assert "no such file" in found["tokenizer"].found


def test_a_model_that_is_not_fetched_yet(tmp_path: Path) -> None:
    found = findings("model=qwen2_0.5b")
    assert [one.status for one in found.values()] == ["warn", "warn", "ok"]
    assert not (tmp_path / "cache").exists()  # nor is it now


def test_a_tokenizer_that_is_missing(write_tiny_llama: Callable[..., Path]) -> None:
    folder = write_tiny_llama("model")
    found = findings(f"load_checkpoint={folder}", "model=auto")
    assert found["model files"].status == "ok"
    assert found["tokenizer"].status == "fail"
    assert "tokenizer_file=" in found["tokenizer"].remedy


def test_a_tokenizer_that_changes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_SAMPLE", " spaces around ")
    found = findings("model=tiny_llama", "load_checkpoint=random")["tokenizer"]
    assert (found.status, found.expected) == ("warn", "' spaces around '")


def test_a_model_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * 10**9)
    found = findings("model=llama2_7b", "load_checkpoint=random")["model memory"]
    assert found.status == "fail"
    assert "the run needs 27." in found.found and "weights 27.0 GB" in found.found
    assert "quant=a16w4 would need" in found.remedy


def test_ranks_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["model=tiny_llama", "load_checkpoint=random", "parallel=tp2"]
    assert "in each rank" in findings(*arguments)["model memory"].found
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    found = findings(*arguments)["model memory"]
    assert found.status == "fail"
    assert "2 ranks of" in found.found


def test_a_device_that_is_not_there() -> None:
    arguments = ["model=tiny_llama", "load_checkpoint=random", "context.device_target=Ascend"]
    found = findings(*arguments)["model memory"]
    assert found.status == "fail"
    assert "no Ascend device" in found.found
