"""The MindFormers process: a stand-in that misbehaves, and one that is not there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from lite_runner.backends.mindformers import process as module
from lite_runner.backends.mindformers.process import (
    Batch,
    MindFormersProcess,
    WorkerGroup,
    free_port,
    start_scheduler,
)
from lite_runner.backends.mindformers.releases import V1_0_2
from lite_runner.errors import ArtifactError, EnvironmentFault, RunnerError
from tests.stand_in_mindformers import python_of

YAML = """
load_checkpoint: {folder}/model.ckpt
model: {{model_config: {{batch_size: 2, seq_length: 9, vocab_size: 12}}}}
"""
OPTIONS = {"num_beams": 1}
Start = Callable[..., MindFormersProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(step="hang")` is a process that hangs in a step, and so on."""
    started: list[MindFormersProcess] = []
    (tmp_path / "model.ckpt").touch()
    (tmp_path / "model.yaml").write_text(YAML.format(folder=tmp_path))

    def run(**acts: object) -> MindFormersProcess:
        python = python_of(tmp_path, **acts)
        started.append(MindFormersProcess(tmp_path, V1_0_2, threads=1, python=python))
        return started[-1]

    yield run
    for one in started:
        one.close()


def test_rows_end_at_their_limits_and_end_tokens(start: Start, tmp_path: Path) -> None:
    process = start()
    assert process.versions["mindformers"] == "1.0.2" and process.pid
    process.load(tmp_path / "model.yaml")
    steps: list[list[tuple[int, int]]] = []
    logits = tmp_path / "logits"
    batch = Batch([[7, 8], [7, 8, 9]], [3, 2], (), 11, OPTIONS, logits)
    assert process.generate(batch, lambda tokens, seconds: steps.append(tokens)) is None
    assert steps == [[(0, 2), (1, 3)], [(0, 3), (1, 4)], [(0, 4)]]
    found = np.fromfile(logits, np.float32).reshape(3, 2, 12)
    assert found.argmax(-1).tolist() == [[2, 3], [3, 4], [4, 5]]
    steps.clear()
    several = Batch([[7, 8], [7, 8, 9]], [4, 4], (3, 5), 11, OPTIONS)
    process.generate(several, lambda tokens, seconds: steps.append(tokens))
    assert steps == [[(0, 2), (1, 3)], [(0, 3)]]
    assert logits.stat().st_size == found.nbytes  # none of the second batch


def test_beams_answer_at_the_end(start: Start, tmp_path: Path) -> None:
    process = start()
    process.load(tmp_path / "model.yaml")
    batch = Batch([[7, 8]], [3], (), 11, {"num_beams": 2})
    assert process.generate(batch, lambda tokens, seconds: None) == [2, 3, 4]


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        ({"start": "die"}, EnvironmentFault, "importing mindformers: .*killed by SIGKILL"),
        ({"load": "die"}, RunnerError, r"loading .*/model\.yaml: .*killed by SIGKILL"),
        ({"load": "refuse"}, ArtifactError, r"loading .*/model\.yaml: .*not such a one"),
        ({"missing": ["wq", "key_past"]}, ArtifactError, "lacks 1 parameters: wq"),
        ({"generate": "refuse"}, RunnerError, "generating: MindFormers 1.0.2 failed: not such"),
        ({"step": "die"}, RunnerError, "generating: MindFormers 1.0.2 was killed by SIGKILL"),
    ],
)
def test_one_that_fails(
    start: Start, tmp_path: Path, act: dict[str, object], error: type[RunnerError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        process = start(**act)
        process.load(tmp_path / "model.yaml")
        process.generate(Batch([[7], [7]], [2, 2], (), 11, OPTIONS), lambda *_: None)
    if "start" in act:
        assert "make mindformers" in caught.value.hint
    assert ("the last words" in caught.value.message) == ("die" in act.values())


@pytest.mark.parametrize(
    ("where", "limit"),
    [("start", "START_SECONDS"), ("load", "LOAD_SECONDS"), ("step", "STEP_SECONDS")],
)
def test_one_that_hangs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, limit: str
) -> None:
    monkeypatch.setattr(module, limit, 0.5)
    with pytest.raises(RunnerError, match=r"MindFormers 1\.0\.2 gave no answer in 0\.5 s"):
        process = start(**{where: "hang"})
        process.load(tmp_path / "model.yaml")
        process.generate(Batch([[7], [7]], [2, 2], (), 11, OPTIONS), lambda *_: None)


def test_another_release(start: Start) -> None:
    with pytest.raises(EnvironmentFault, match=r"has mindformers 1\.3\.2, expected 1\.0\.2"):
        start(version="1.3.2")


def test_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(tmp_path / "python"))
    with pytest.raises(EnvironmentFault, match="LITE_RUNNER_MINDFORMERS_PYTHON="):
        MindFormersProcess(tmp_path, V1_0_2, threads=None)


SHARED_YAML = """
use_parallel: true
load_checkpoint: {folder}/model.ckpt
auto_trans_ckpt: true
parallel: {{parallel_mode: 1, full_batch: true}}
parallel_config: {{model_parallel: 2, vocab_emb_dp: false}}
model: {{model_config: {{batch_size: 2, seq_length: 9, vocab_size: 12}}}}
"""
CLUSTER = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_TOPO_TIMEOUT": "30"}
StartGroup = Callable[..., "Workers"]


def test_the_environment_of_each() -> None:
    group = WorkerGroup(2, 8118, 30, devices=[5, 4], more={"HCCL_EXEC_TIMEOUT": "300"})
    cluster = {**CLUSTER, "MS_SCHED_PORT": "8118"}
    assert group.scheduler_variables == {"MS_ROLE": "MS_SCHED", **cluster}
    assert group.variables(1) == {
        "MS_ROLE": "MS_WORKER",
        **cluster,
        "MS_NODE_ID": "1",
        "RANK_ID": "1",
        "RANK_SIZE": "2",
        "DEVICE_ID": "1",
        "ASCEND_RT_VISIBLE_DEVICES": "4,5",
        "HCCL_EXEC_TIMEOUT": "300",
    }
    assert "ASCEND_RT_VISIBLE_DEVICES" not in WorkerGroup(2, 8118, 30).variables(0)


class Workers:
    """A scheduler and its two workers, over stand-ins."""

    def __init__(self, folder: Path, pythons: tuple[Path, Path], resources: ExitStack) -> None:
        self.folder = folder
        self.group = WorkerGroup(2, free_port(), 30)
        self.scheduler = start_scheduler(V1_0_2.python, pythons[0], self.group)
        resources.callback(self.scheduler.close)
        self.processes = []
        for rank, python in enumerate(pythons):
            process = MindFormersProcess(
                folder,
                V1_0_2,
                threads=1,
                python=python,
                variables=self.group.variables(rank),
                scheduler=None if rank else self.scheduler,
            )
            resources.callback(process.close)
            self.processes.append(process)

    def load(self) -> list[BaseException | None]:
        """Both load at once: why each did not."""
        with ThreadPoolExecutor() as pool:
            loads = [
                pool.submit(process.load, self.folder / "model.yaml") for process in self.processes
            ]
            return [load.exception(60) for load in loads]


@pytest.fixture
def start_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartGroup]:
    """`start(schedule="die", second={"join": "die"})`: a scheduler and two workers, the second of
    which has acts of its own."""
    (tmp_path / "model.ckpt").touch()
    (tmp_path / "model.yaml").write_text(SHARED_YAML.format(folder=tmp_path))
    # Of the job that this process is a rank of.
    for name in ("RANK_TABLE_FILE", "MS_SCHED_PORT", "MS_LOCAL_WORKER"):
        monkeypatch.setenv(name, "9")
    (tmp_path / "second").mkdir()
    with ExitStack() as resources:

        def run(second: dict[str, object] | None = None, **acts: object) -> Workers:
            pythons = python_of(tmp_path, **acts), python_of(tmp_path / "second", **(second or {}))
            return Workers(tmp_path, pythons, resources)

        yield run


def test_ranks_meet_and_generate_together(start_group: StartGroup, tmp_path: Path) -> None:
    workers = start_group()
    assert workers.load() == [None, None]
    for rank in range(2):
        report = json.loads((tmp_path / f"report-{rank}").read_text())
        assert report["auto_trans_ckpt"] is True and report["cwd"] == str(tmp_path)
        mine = workers.group.variables(rank)
        ours = ("MS_", "RANK", "DEVICE", "ASCEND")
        kept = {name: text for name, text in report["environ"].items() if name.startswith(ours)}
        assert kept == mine  # and nothing of this process's own job
    batch = Batch([[7, 8], [7, 8, 9]], [2, 2], (), 11, {"num_beams": 1})
    for process in workers.processes:
        steps: list[list[tuple[int, int]]] = []
        process.generate(batch, lambda tokens, seconds, steps=steps: steps.append(tokens))
        assert steps == [[(0, 2), (1, 3)], [(0, 3), (1, 4)]]


def test_a_scheduler_that_is_killed(start_group: StartGroup) -> None:
    workers = start_group(second={"join": "hang"})
    os.kill(workers.scheduler.pid, signal.SIGKILL)
    with pytest.raises(RunnerError) as caught:
        workers.processes[0].load(workers.folder / "model.yaml")
    assert str(workers.folder / "model.yaml") in caught.value.message
    expected = "the scheduler of MindFormers 1.0.2's workers was killed by SIGKILL"
    assert expected in caught.value.message
    with pytest.raises(RunnerError, match="already closed"):
        workers.processes[0].load(workers.folder / "model.yaml")


def test_a_scheduler_that_dies_during_generation(start_group: StartGroup) -> None:
    workers = start_group(step="hang")
    assert workers.load() == [None, None]
    os.kill(workers.scheduler.pid, signal.SIGKILL)
    batch = Batch([[7], [7]], [2, 2], (), 11, {"num_beams": 1})
    with pytest.raises(RunnerError, match=r"generating: the scheduler of .* was killed by SIGKILL"):
        workers.processes[0].generate(batch, lambda *_: None)


def test_a_scheduler_that_fails(start_group: StartGroup) -> None:
    with pytest.raises(RunnerError, match=r"the scheduler of .* failed: not such a one"):
        workers = start_group(schedule="refuse", second={"join": "hang"})
        workers.processes[0].load(workers.folder / "model.yaml")


def test_a_worker_that_dies(start_group: StartGroup) -> None:
    workers = start_group(second={"join": "die"})
    with ThreadPoolExecutor() as pool:
        first, second = (
            pool.submit(process.load, workers.folder / "model.yaml")
            for process in workers.processes
        )
        error = second.exception(60)
        workers.processes[0].close()  # as its rank ends it, when the launcher ends that
        assert isinstance(first.exception(60), RunnerError)
    assert isinstance(error, RunnerError)
    assert "MindFormers 1.0.2 was killed by SIGKILL" in error.message
    assert "the last words" in error.message


def test_a_checkpoint_that_is_refused(start_group: StartGroup) -> None:
    errors = start_group(transform="refuse", second={"transform": "refuse"}).load()
    assert all(isinstance(error, ArtifactError) for error in errors)
