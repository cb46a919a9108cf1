"""run_mode=doctor as a user runs it, and models that are broken, missing or too large; what the
checks of the machine find is tested in tests/doctor/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.doctor import machine as checkup
from lite_runner.doctor.check import Check, Finding
from lite_runner.run_modes import doctor as run_mode
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment, memory

MODEL = ["model files", "tokenizer", "model memory"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The checks of the machine, which take seconds: one that is well."""
    checks = [Check("python", lambda: Finding("ok", "3.11"))]
    monkeypatch.setattr(checkup, "machine_checks", lambda *_, **__: checks)
    return checks


def doctor(*arguments: str) -> int:
    return main(["run_mode=doctor", *arguments])


def test_a_healthy_machine(machine: list[Check], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    python               3.11",
        "1 checks: 1 ok, 0 warn, 0 fail",
    ]
    assert not Path("outputs").exists() and not Path("cache").exists()


def test_a_failed_check_exits_with_3(
    machine: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.append(Check("disk", lambda: Finding("fail", "full", "space", "make some")))
    assert doctor() == 3
    output = capsys.readouterr()
    assert "fail  disk                 full, expected space\n      -> make some" in output.out
    assert output.err.startswith("error: not everything works here\n")


def test_json_is_one_document(machine: list[Check], capsys: pytest.CaptureFixture[str]) -> None:
    machine.append(Check("disk", lambda: Finding("fail", "full")))
    assert doctor("output_format=json") == 3
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [(one["name"], one["status"]) for one in found["checks"]] == [
        ("python", "ok"),
        ("disk", "fail"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["model=tiny_llama"],
        ["model=tiny_llama", "parallel=tp2"],
        ["model=auto", "load_checkpoint=none.gguf"],
        ["load_checkpoint=none.gguf"],
        ["pretrained_model_dir=none"],
        ["--config=named.yaml"],
    ],
)
def test_a_model_that_is_named_is_checked(
    arguments: list[str], machine: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("named.yaml").write_text("defaults:\n  - model: tiny_llama\n  - _self_\n")
    doctor(*arguments, "output_format=json")
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["checks"]] == ["python", *MODEL]
    expected = "fail" if "none" in "".join(arguments) else "ok"
    assert found["checks"][1]["status"] == expected


def test_packages_of_other_versions_do_not_stop_it(
    machine: list[Check], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "installed", lambda _: "0.1")
    with pytest.raises(environment.EnvironmentFault):
        environment.check_packages()
    assert doctor() == 0


def test_dry_run_names_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("model=tiny_llama", "dry_run=true") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "run mode      doctor"
    assert second.startswith("checks        python, ")
    assert second.endswith(f"port, msrun, {', '.join(MODEL)}")


def test_keys_of_other_run_modes_have_no_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("predict_data=hi", "output_format=jsonl") == 2
    stderr = capsys.readouterr().err
    assert "predict_data has no effect with run_mode=doctor" in stderr
    assert "output_format: got 'jsonl', expected one of text, json" in stderr


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, msrun with two ranks too."""
    assert doctor("model=tiny_llama", "load_checkpoint=random") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python")
    assert lines[-1].endswith(" 0 fail")


def findings(*arguments: str) -> dict[str, Finding]:
    config = resolve(parse(["run_mode=doctor", *arguments], heads()))[0]
    checks = run_mode.model_checks(config)  # type: ignore[arg-type]
    return {check.name: check.finding() for check in checks}


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
    monkeypatch.setattr(run_mode, "_SAMPLE", " spaces around ")
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
