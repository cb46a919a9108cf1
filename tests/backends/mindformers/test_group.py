"""Workers that share a model: what their environment says, and who of them is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from lite_runner.backends.mindformers.group import (
    WorkerGroup,
    WorkerPlace,
    free_port,
    start_scheduler,
)
from lite_runner.backends.mindformers.process import Batch, MindFormersProcess
from lite_runner.backends.mindformers.release_1_0 import V1_0_2
from lite_runner.errors import ArtifactError, RunnerError
from tests.stand_in_mindformers import python_of

YAML = """
use_parallel: true
load_checkpoint: {folder}/model.ckpt
auto_trans_ckpt: true
parallel: {{parallel_mode: 1, full_batch: true}}
parallel_config: {{model_parallel: 2, vocab_emb_dp: false}}
model: {{model_config: {{batch_size: 2, seq_length: 9, vocab_size: 12}}}}
"""
CLUSTER = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_TOPO_TIMEOUT": "30"}
Start = Callable[..., "Workers"]


def test_the_environment_of_each() -> None:
    group = WorkerGroup(2, 8118, 30, devices=[5, 4], more={"HCCL_EXEC_TIMEOUT": "300"})
    cluster = {**CLUSTER, "MS_SCHED_PORT": "8118"}
    assert group.scheduler_variables == {"MS_ROLE": "MS_SCHED", **cluster}
    assert WorkerPlace(group, 1).variables == {
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
            place = WorkerPlace(self.group, rank, None if rank else self.scheduler)
            process = MindFormersProcess(folder, V1_0_2, threads=1, python=python, place=place)
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
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(schedule="die", second={"join": "die"})`: a scheduler and two workers, the second of
    which has acts of its own."""
    (tmp_path / "model.ckpt").touch()
    (tmp_path / "model.yaml").write_text(YAML.format(folder=tmp_path))
    # Of the job that this process is a rank of.
    for name in ("RANK_TABLE_FILE", "MS_SCHED_PORT", "MS_LOCAL_WORKER"):
        monkeypatch.setenv(name, "9")
    (tmp_path / "second").mkdir()
    with ExitStack() as resources:

        def run(second: dict[str, object] | None = None, **acts: object) -> Workers:
            pythons = python_of(tmp_path, **acts), python_of(tmp_path / "second", **(second or {}))
            return Workers(tmp_path, pythons, resources)

        yield run


def test_they_meet_and_generate_together(start: Start, tmp_path: Path) -> None:
    workers = start()
    assert workers.load() == [None, None]
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}").read_text())
        assert told["auto_trans_ckpt"] is True and told["cwd"] == str(tmp_path)
        mine = workers.group.variables(rank)
        ours = ("MS_", "RANK", "DEVICE", "ASCEND")
        kept = {name: text for name, text in told["environ"].items() if name.startswith(ours)}
        assert kept == mine  # and nothing of this process's own job
    batch = Batch([[7, 8], [7, 8, 9]], [2, 2], (), 11, {"num_beams": 1})
    for process in workers.processes:
        steps: list[list[tuple[int, int]]] = []
        process.generate(batch, lambda tokens, seconds, steps=steps: steps.append(tokens))
        assert steps == [[(0, 2), (1, 3)], [(0, 3), (1, 4)]]


def test_a_scheduler_that_is_killed(start: Start) -> None:
    workers = start(second={"join": "hang"})
    os.kill(workers.scheduler.pid, signal.SIGKILL)
    with pytest.raises(RunnerError) as caught:
        workers.processes[0].load(workers.folder / "model.yaml")
    assert str(workers.folder / "model.yaml") in caught.value.message
    expected = "the scheduler of MindFormers 1.0.2's workers was killed by SIGKILL"
    assert expected in caught.value.message
    with pytest.raises(RunnerError, match="already closed"):
        workers.processes[0].load(workers.folder / "model.yaml")


def test_a_scheduler_that_dies_while_they_generate(start: Start) -> None:
    workers = start(step="hang")
    assert workers.load() == [None, None]
    os.kill(workers.scheduler.pid, signal.SIGKILL)
    batch = Batch([[7], [7]], [2, 2], (), 11, {"num_beams": 1})
    with pytest.raises(RunnerError, match=r"generating: the scheduler of .* was killed by SIGKILL"):
        workers.processes[0].generate(batch, lambda *_: None)


def test_a_scheduler_that_fails(start: Start) -> None:
    with pytest.raises(RunnerError, match=r"the scheduler of .* failed: not such a one"):
        workers = start(schedule="refuse", second={"join": "hang"})
        workers.processes[0].load(workers.folder / "model.yaml")


def test_a_worker_that_dies(start: Start) -> None:
    workers = start(second={"join": "die"})
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


def test_a_checkpoint_that_is_refused(start: Start) -> None:
    errors = start(transform="refuse", second={"transform": "refuse"}).load()
    assert all(isinstance(error, ArtifactError) for error in errors)
