"""run_mode=doctor as a user runs it; what the checks find is tested in tests/doctor/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.doctor import machine as checkup
from lite_runner.doctor.check import Check, Finding
from lite_runner.system import environment, packages

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
    said = capsys.readouterr()
    assert "fail  disk                 full, expected space\n      -> make some" in said.out
    assert said.err.startswith("error: not everything works here\n")


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
    monkeypatch.setattr(packages, "installed", lambda _: "0.1")
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
    said = capsys.readouterr().err
    assert "predict_data has no effect with run_mode=doctor" in said
    assert "output_format: got 'jsonl', expected one of text, json" in said


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, msrun with two ranks too."""
    assert doctor("model=tiny_llama", "load_checkpoint=random") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python")
    assert lines[-1].endswith(" 0 fail")
