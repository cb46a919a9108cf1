"""Profiles: phases without what is inside them, traces within the run, nothing when off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lite_runner import profiler, progress
from lite_runner.app import main

RUN = ["model=tiny_llama", "load_checkpoint=random", "backend=native", "predict_data=hello there"]
RUN += ["max_new_tokens=6", "profile=true"]


@pytest.fixture(autouse=True)
def nobody_records() -> Iterator[None]:
    yield
    profiler.stop()
    profiler.folder = None


def test_phases_do_not_count_what_is_inside_them() -> None:
    recorder = profiler.start()
    with recorder.phase("plan"):
        time.sleep(0.02)
        with progress.step("pack something"):
            time.sleep(0.05)
        with progress.step("generate"):  # no phase of its own
            pass
    now = time.perf_counter()
    recorder.step(now - 0.04, now - 0.01, now, rows=2, prompt=3, new=1)
    assert profiler.stop() is recorder and profiler.recorder is None
    phases = recorder.report().phases
    assert 0.02 <= phases["plan"] < 0.05 <= phases["pack"]
    assert phases["prefill"] == pytest.approx(0.03 * 3 / 4)
    assert phases["decode"] == pytest.approx(0.03 / 4)
    assert phases["sample"] == pytest.approx(0.01)
    assert [*phases] == ["plan", "pack", "prefill", "decode", "sample", "other"]


def test_off_nothing_is_recorded() -> None:
    with profiler.phase("plan"), progress.step("pack something"):
        pass
    assert profiler.recorder is None and profiler.stop() is None


def test_a_run_has_tables_and_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    said = capsys.readouterr().err
    folder = Path("outputs/latest")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))["profile"]
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"], rel=1e-3)
    assert {"start", "plan", "read", "prefill", "decode", "sample", "write"} <= set(found["phases"])
    steps = found["steps"]
    assert (steps["steps"], steps["new_tokens"]) == (6, 5)
    kinds = {one["name"]: one for one in found["kernels"]}
    assert [*kinds] == ["embedding", "attention", "feed_forward", "head"]
    assert kinds["attention"]["calls"] == 2 * 6 and kinds["head"]["calls"] == 6
    spent = sum(one["seconds"] for one in found["kernels"])
    assert 0 < spent <= steps["forward_s"]
    assert sum(one["seconds"] for one in found["layers"]) == pytest.approx(spent)
    assert found["bandwidth"] > 1e8 and found["peak_macs_s"] > 1e8
    assert "native kernels" in said and "whole process" in said

    events = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["cat"] for one in spans} >= {"start", "prefill", "decode", "sample", "native"}
    assert sum(one["cat"] == "native" for one in spans) == 6 * 6
    for one in spans:
        assert one["ts"] >= 0 and one["dur"] >= 0
        assert one["ts"] + one["dur"] <= found["seconds"] * 1e6 + 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["run_mode=doctor"], "profile=true has no effect with run_mode=doctor"),
        (["parallel=dp2", "predict_data=[a,b]"], "profile=true is of one process"),
    ],
)
def test_validation_errors(faults: Callable[..., str], settings: list[str], expected: str) -> None:
    assert expected in faults("model=tiny_llama", "profile=true", *settings)


def test_it_is_the_flag_of_run_mindformer() -> None:
    words = [word for word in RUN if word != "profile=true"]
    assert main([*words, "verbosity=0", "--profile", "True"]) == 0
    assert Path("outputs/latest/trace.json").is_file()


def test_what_mindformers_files_ask_for(resolve: Callable[..., Any], tmp_path: Path) -> None:
    """ProfileMonitor among the callbacks, or context.profile; of ranks the former has no effect."""
    for text in ("callbacks: [{type: ProfileMonitor}]", "context: {profile: true}"):
        (tmp_path / "a.yaml").write_text(f"trainer: {{model_name: tiny_llama}}\n{text}\n")
        assert resolve("--config", str(tmp_path / "a.yaml"), "predict_data=a").profile
    (tmp_path / "a.yaml").write_text("callbacks: [{type: ProfileMonitor}]\n")
    assert not resolve(
        "--config",
        str(tmp_path / "a.yaml"),
        "parallel=dp2",
        "model=tiny_llama",
        "predict_data=[a,b]",
    ).profile
