"""The MindFormers process: a stand-in that misbehaves, and one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lite_runner.backends.mindformers import process as module
from lite_runner.backends.mindformers.process import Batch, MindFormersProcess
from lite_runner.backends.mindformers.release_1_0 import V1_0_2
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
