"""Profiles: phases without what is inside them, traces within the run, nothing when off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lite_runner import profiler, progress
from lite_runner.app import main
from lite_runner.profile import Process, job_profile, job_table, trace
from lite_runner.recorder import Recorder

RUN = ["model=tiny_llama", "load_checkpoint=random", "backend=native", "predict_data=hello there"]
RUN += ["max_new_tokens=6", "profile=true"]


@pytest.fixture(autouse=True)
def nobody_records() -> Iterator[None]:
    yield
    profiler.stop()
    profiler.folder = None


def test_phases_do_not_count_what_is_inside_them() -> None:
    recorder = profiler.start()
    began = time.perf_counter()
    with recorder.phase("plan"):
        time.sleep(0.02)
        with progress.step("anything", phase="pack"):
            time.sleep(0.05)
        with progress.step("generate"):  # no phase of its own
            pass
    now = time.perf_counter()
    recorder.step(now - 0.04, now - 0.01, now, rows=2, prompt=3, new=1)
    assert profiler.stop() is recorder and profiler.recorder is None
    phases = recorder.report().phases
    assert phases["plan"] >= 0.02 and phases["pack"] >= 0.05
    assert phases["plan"] + phases["pack"] <= now - began
    assert phases["prefill"] == pytest.approx(0.03 * 3 / 4)
    assert phases["decode"] == pytest.approx(0.03 / 4)
    assert phases["sample"] == pytest.approx(0.01)
    assert [*phases] == ["plan", "pack", "prefill", "decode", "sample", "other"]


def test_off_nothing_is_recorded() -> None:
    with profiler.phase("plan"), progress.step("anything", phase="pack"):
        pass
    assert profiler.recorder is None and profiler.stop() is None


def test_a_run_has_tables_and_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    stderr = capsys.readouterr().err
    folder = Path("outputs/latest")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))["profile"]
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"], rel=1e-3)
    expected = {"start", "plan", "read", "pack", "prefill", "decode", "sample", "write"}
    assert expected <= set(found["phases"])
    steps = found["steps"]
    assert (steps["steps"], steps["new_tokens"]) == (6, 5)
    kinds = {one["name"]: one for one in found["kernels"]}
    assert [*kinds] == ["embedding", "attention", "feed_forward", "head"]
    assert kinds["attention"]["calls"] == 2 * 6 and kinds["head"]["calls"] == 6
    spent = sum(one["seconds"] for one in found["kernels"])
    assert 0 < spent <= steps["forward_s"]
    assert sum(one["seconds"] for one in found["layers"]) == pytest.approx(spent)
    assert found["bandwidth"] > 1e8 and found["peak_macs_s"] > 1e8
    assert "native kernels" in stderr and "whole process" in stderr

    events = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["cat"] for one in spans} >= {"start", "prefill", "decode", "sample", "native"}
    assert sum(one["cat"] == "native" for one in spans) == 6 * 6
    for one in spans:
        assert one["ts"] >= 0 and one["dur"] >= 0
        assert one["ts"] + one["dur"] <= found["seconds"] * 1e6 + 1


def test_there_is_none_of_doctor(faults: Callable[..., str]) -> None:
    errors = faults("model=tiny_llama", "profile=true", "run_mode=doctor")
    assert "profile=true has no effect with run_mode=doctor" in errors


def recorded(name: str, began: float, machine: str, met: float) -> Process:
    """A process of a job, of ten seconds on its clock."""
    recorder = Recorder(began, profiler.MOST_EVENTS)
    recorder.ended = began + 10.0
    recorder.slice("prefill", "prefill", began + 1.0, began + 3.0)
    recorder.step(began + 3.0, began + 5.0, began + 5.5, rows=1, prompt=0, new=1)
    recorder.gathered(began + 6.0, began + 8.0, began + 8.5, 2_000_000)
    process = replace(recorder.process(name, met=met), machine=machine)
    return Process.from_bytes(process.to_bytes())


def test_the_first_events_of_a_process_are_kept() -> None:
    whole = recorded("launcher", 50.0, "a", 0.0)
    short = whole.shortened(1)
    assert whole.shortened(len(whole.events)) == whole and len(whole.events) > 1
    assert short.events == whole.events[:1]
    assert short.profile.events_left_out == len(whole.events) - 1
    assert replace(short.profile, events_left_out=0) == whole.profile


def test_processes_of_a_job_share_a_clock() -> None:
    """One of another machine, whose clock is 1000 s ahead, left the last collective as the others
    did."""
    first, second = recorded("rank 0", 50.0, "a", 59.0), recorded("rank 1", 51.0, "a", 59.0)
    other = recorded("rank 2", 1052.0, "b", 1059.0)
    events = json.loads(trace([first, second, other]))["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1", 3: "rank 2"}
    starts = [one["ts"] for one in events if one["name"] == "prefill"]
    assert starts == pytest.approx([1e6, 2e6, 3e6])
    found = job_profile([first, second, other])
    assert found["seconds"] == pytest.approx(12.0)
    (gather,) = found["processes"][1]["collectives"]
    assert (gather["calls"], gather["bytes"]) == (1, 2_000_000)
    assert (gather["waiting_s"], gather["moving_s"]) == pytest.approx((2.0, 0.5))
    unknown = replace(first.profile.collectives[0], waiting_s=None)
    first = replace(first, profile=replace(first.profile, collectives=(unknown,)))
    rows = [line.split() for line in job_table([first, second, other])]
    assert ["rank", "0", "gather", "1", "2.500", "-", "-", "2.00"] in rows
    assert ["rank", "2", "gather", "1", "2.500", "2.000", "0.500", "2.00"] in rows


def test_a_launcher_is_there_until_its_ranks_are_done() -> None:
    before, rank = recorded("launcher", 40.0, "a", 0.0), recorded("rank 0", 52.0, "a", 60.0)
    launcher = before.with_ranks(61.0)
    assert launcher.profile.phases["ranks"] == pytest.approx(11.0)
    events = json.loads(trace([launcher, rank]))["traceEvents"]
    (ranks,) = (one for one in events if one["name"] == "ranks")
    assert (ranks["ts"], ranks["dur"]) == pytest.approx((10e6, 11e6))
    assert job_profile([launcher, rank])["seconds"] == pytest.approx(22.0)


def test_it_is_the_flag_of_run_mindformer() -> None:
    words = [word for word in RUN if word != "profile=true"]
    assert main([*words, "verbosity=0", "--profile", "True"]) == 0
    assert Path("outputs/latest/trace.json").is_file()


def test_profiles_of_mindformers_files(resolve: Callable[..., Any], tmp_path: Path) -> None:
    """ProfileMonitor among the callbacks, or context.profile."""
    for text in ("callbacks: [{type: ProfileMonitor}]", "context: {profile: true}"):
        (tmp_path / "a.yaml").write_text(f"trainer: {{model_name: tiny_llama}}\n{text}\n")
        assert resolve("--config", str(tmp_path / "a.yaml"), "predict_data=a").profile
