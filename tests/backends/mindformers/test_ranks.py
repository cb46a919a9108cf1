"""Ranks that share a model on MindFormers: which can, and how their workers are started. There is
no device here: the workers are stand-ins, and the ranks threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner import joined
from lite_runner.app import main
from lite_runner.backends import collectives
from lite_runner.backends.mindformers import run as module
from lite_runner.backends.mindformers.process import Batch
from lite_runner.backends.mindformers.run import open_mindformers
from lite_runner.config.argv import parse
from lite_runner.config.sections import Ranks
from lite_runner.distributed.membership import Member
from lite_runner.errors import RunnerError
from lite_runner.plan.resources import options_of
from lite_runner.run_modes import heads, resolve
from lite_runner.run_modes.predict import plan as plan_generation
from lite_runner.system import environment
from tests.stand_in_mindformers import python_of

SHARED = ["model=tiny_bloom", "backend=mindformers", "load_checkpoint=random", "parallel=tp2"]
PROMPTS = ["predict_data=[a,bcd]", "max_new_tokens=3", "eos_token_id=[]"]
ASCEND = "context.device_target=Ascend"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command line that is refused."""
    assert main([*SHARED, *PROMPTS, *words]) == 2
    return capsys.readouterr().err


def test_a_processor_shares_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys)
    assert "backend=mindformers, parallel_config.model_parallel=2: MindFormers leaves the" in error
    assert "Invalid communication backend: CPU" in error and "backend=ms shares a model" in error


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["parallel.local_worker_num=1", "parallel.master_port=8118"],
            "the ranks are on 2 machines, expected one: MindFormers reshards the checkpoint in one",
        ),
        (
            ["model=tiny_qwen2", "parallel=tp4"],
            "MindFormers gives every rank key/value heads of its own, and the model has 2",
        ),
    ],
)
def test_devices_that_cannot_share(
    capsys: pytest.CaptureFixture[str], settings: list[str], expected: str
) -> None:
    assert expected in refused(capsys, ASCEND, "dry_run=true", *settings)


@pytest.mark.parametrize("release", ["1.0.2", "1.9.0"])
def test_the_yaml_has_the_parallel_section(
    capsys: pytest.CaptureFixture[str], release: str
) -> None:
    """As the yamls of MindFormers' own have it; 1.9.0 reads its checkpoints as the older ones."""
    line = ["model=tiny_qwen2", f"mindformers.release={release}", ASCEND, "dry_run=true"]
    assert main([*SHARED, *PROMPTS, *line, "parallel_config.vocab_emb_dp=true"]) == 0
    _, _, text = capsys.readouterr().out.partition("mindformers.yaml:")
    found: dict[str, Any] = yaml.safe_load(text)
    assert found["use_parallel"] is True and found["auto_trans_ckpt"] is True
    parallel, sizes = found["parallel"], found["parallel_config"]
    assert (parallel["parallel_mode"], parallel["full_batch"]) == (1, True)
    assert sizes["model_parallel"] == 2 and sizes["data_parallel"] == 1
    assert sizes["vocab_emb_dp"] is True and sizes["pipeline_stage"] == 1
    assert found["runner_config"]["sink_mode"] is True
    assert found["load_ckpt_format"] == "ckpt"


def test_a_rank_meets_the_others_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is its worker's."""
    monkeypatch.setattr(joined, "choose_device", lambda *_: "Ascend")
    member = Member(size=2, rank=1, device_id=1)
    for backend, meets_on in (("mindformers", "CPU"), ("ms", "Ascend")):
        config, _ = resolve(parse([*SHARED, *PROMPTS, f"backend={backend}"], heads()))
        found = joined.own_device(config.context, member, elsewhere=config.in_mindformers)
        assert found == ("Ascend", 1, meets_on)


class Gather:
    """collectives.gather of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.payloads: dict[int, bytes] = {}
        self.rank = threading.local()

    def __call__(self, payload: bytes) -> list[bytes]:
        self.payloads[self.rank.number] = payload
        self.barrier.wait()
        return [self.payloads[rank] for rank in sorted(self.payloads)]


Share = Callable[..., Sequence[Any]]


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Share:
    """`share(work, join="die")`: what `work(opened, rank)` makes of each of two ranks on an Ascend
    device that there is not, over a stand-in whose join dies, or why that rank failed."""
    for one in (environment, module):
        monkeypatch.setattr(one, "seen_ids", lambda *_: [4, 5], raising=False)
    monkeypatch.setattr(environment, "physical_ids", lambda: [4, 5])

    def run(work: Callable[[Any, int], Any], timeout: int = 60, **acts: object) -> Sequence[Any]:
        monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python_of(tmp_path, **acts)))
        alone = [word for word in SHARED if not word.startswith("parallel=")]
        one = plan_generation(resolve(parse([*alone, *PROMPTS], heads()))[0])
        patience = f"parallel.rendezvous_timeout={timeout}"
        config, _ = resolve(parse([*SHARED, *PROMPTS, ASCEND, patience], heads()))
        monkeypatch.setattr(module, "START_SECONDS", 0)
        gather = Gather(2)
        monkeypatch.setattr(collectives, "gather", gather)

        def rank(number: int) -> Any:
            gather.rank.number = number
            placed = replace(config, context=replace(config.context, device_id=number))
            plan = replace(one, config=placed, device="Ascend")
            plan = replace(plan, ranks=Ranks(number, tensor=2))
            try:
                options = replace(options_of(plan), folder=tmp_path / "run")
                with closing(open_mindformers(plan.model, options)) as opened:
                    found = work(opened, number)
                    gather.barrier.wait()
                    return found
            except RunnerError as error:
                gather.barrier.abort()
                return error
            except threading.BrokenBarrierError as error:
                return error

        (tmp_path / "run").mkdir()
        with ThreadPoolExecutor() as pool:
            return list(pool.map(rank, range(2)))

    return run


def test_their_workers_meet_and_generate_the_same(share: Share, tmp_path: Path) -> None:
    def work(opened: Any, rank: int) -> Any:
        report = yaml.safe_load((opened.work / f"report-{rank}").read_text())
        steps: list[list[tuple[int, int]]] = []
        batch = Batch([[7], [7, 8, 9]], [2, 2], (), 11, {"num_beams": 1})
        opened.process.generate(batch, lambda tokens, seconds: steps.append(tokens))
        return report["environ"], str(opened.work), steps

    first, second = share(work)
    assert first[2] == second[2] == [[(0, 1), (1, 3)], [(0, 2), (1, 4)]]
    assert first[1] == second[1], "one folder: MindFormers' first rank reshards for all"
    for rank, (environ, _, _) in enumerate((first, second)):
        assert environ["MS_ROLE"] == "MS_WORKER" and environ["RANK_ID"] == str(rank)
        assert environ["MS_SCHED_PORT"] == first[0]["MS_SCHED_PORT"]
        assert environ["ASCEND_RT_VISIBLE_DEVICES"] == "4,5"
        assert environ["HCCL_EXEC_TIMEOUT"]
    # One yaml for both, and no checkpoint is left.
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mindformers.yaml"]


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        # The launcher ends the other one, which here waits for the scheduler in vain.
        (
            {"schedule": "refuse", "timeout": 2},
            "the scheduler of MindFormers 1.0.2's workers failed: not such",
        ),
        ({"join": "die"}, "MindFormers 1.0.2 was killed by SIGKILL"),
        ({"transform": "refuse"}, "MindFormers 1.0.2 failed: not such a one"),
    ],
)
def test_nothing_is_left_where_one_fails(
    share: Share, tmp_path: Path, acts: dict[str, Any], expected: str
) -> None:
    found = share(lambda opened, rank: None, **acts)
    messages = [error.message for error in found if isinstance(error, RunnerError)]
    assert any(expected in message for message in messages)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mindformers.yaml"]


@pytest.mark.usefixtures("light_msrun")
def test_two_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, each with a MindFormers of its own, complete what one does."""
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python_of(tmp_path)))
    line = ["model=tiny_gpt2", "predict_data=[hello,the cat,abc]", "max_new_tokens=4", "seed=3"]
    found = []
    for parallel in ([], ["parallel=dp2"]):
        assert main([*line, "backend=mindformers", *parallel]) == 0
        result = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
        assert result["engine"] == "mindformers-1.0.2"
        assert result["world_size"] == 1 + len(parallel)
        found.append([row["token_ids"] for row in result["results"]])
    assert found[0] == found[1] and len(found[0]) == 3
    yamls = sorted(path.name for path in Path("outputs/latest/").glob("*mindformers.yaml"))
    assert yamls == ["1-mindformers.yaml", "mindformers.yaml"]
