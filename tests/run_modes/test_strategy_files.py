"""Strategy files that a predict run leaves, alone or beside its results; those of an earlier run
are replaced, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lite_runner import app
from lite_runner.config.argv import parse
from lite_runner.config.sections import Ranks
from lite_runner.output import RunFolder
from lite_runner.plan import Plan
from lite_runner.run_modes import heads, predict, resolve
from lite_runner.run_modes.predict import write_strategy_files
from lite_runner.weights.sharding.partition import strategy_of
from lite_runner.weights.sharding.strategy import read_strategy
from tests.models import model_named
from tests.refusals import refused

PREDICT = ["model=tiny_llama", "predict_data=hello"]
YAML = """
run_mode: predict
only_save_strategy: True
use_parallel: True
trainer: {model_name: tiny_llama}
parallel: {parallel_mode: 1, strategy_ckpt_save_file: "./ckpt_strategy.ckpt"}
parallel_config: {data_parallel: 1, model_parallel: 2, vocab_emb_dp: True}
"""


def test_the_documents_first_step_of_sharding(capsys: pytest.CaptureFixture[str]) -> None:
    Path("predict.yaml").write_text(YAML)
    words = ["--config", "predict.yaml", "--input_data", "hello"]
    assert app.main(words) == 0, capsys.readouterr().err
    written = Path("outputs/strategy")
    assert {path.name for path in written.iterdir()} == {
        f"ckpt_strategy_rank_{rank}.ckpt" for rank in range(2)
    }
    assert read_strategy(written) == strategy_of(
        model_named("tiny_llama"), Ranks(0, 1, 2), vocab_parallel=False
    )
    result = json.loads(Path("outputs/latest/result.json").read_text())
    assert (result["results"], result["world_size"]) == ([], 2)
    # transform_checkpoint.py of the documents takes the folder.
    times = [path.stat().st_mtime_ns for path in sorted(written.iterdir())]
    assert app.main(words) == 0  # again: they are there
    assert [path.stat().st_mtime_ns for path in sorted(written.iterdir())] == times


def test_the_first_rank_of_a_run_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "complete", lambda *_: None)
    words = [*PREDICT, "parallel=tp2", "parallel.strategy_ckpt_save_file=x.ckpt"]
    config, _ = resolve(parse(words, heads()))
    for rank in (1, 0):
        predict.run(Plan(config=config, ranks=Ranks(rank, 1, 2)), RunFolder(Path()))
        assert bool(list(Path().rglob("*.ckpt"))) is (rank == 0)


@pytest.mark.parametrize("role", ["MS_WORKER", "MS_SCHED"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_msrun_rank_0_writes_them(
    monkeypatch: pytest.MonkeyPatch, role: str, rank: str
) -> None:
    cluster = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118"}
    for name, value in {**cluster, "MS_ROLE": role, "RANK_ID": rank}.items():
        monkeypatch.setenv(name, value)
    assert app.main([*PREDICT, "parallel=tp2", "only_save_strategy=true"]) == 0
    assert Path("outputs").exists() is (role == "MS_WORKER" and rank == "0")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", "outputs/strategy/ckpt_strategy_rank_1.ckpt"),
        ("./s.ckpt", "outputs/strategy/s_rank_1.ckpt"),
        ("here/s_rank_0.ckpt", "here/s_rank_1.ckpt"),
    ],
)
def test_paths_of_strategy_files(asked: str, expected: str) -> None:
    words = [*PREDICT, "parallel=tp2", f"parallel.strategy_ckpt_save_file={asked}"]
    config, _ = resolve(parse(words, heads()))
    plan = Plan(config=config, ranks=config.ranks)
    assert str(write_strategy_files(plan)[1]) == expected
    assert Path(expected).is_file()


@pytest.mark.parametrize("other", [b"my notes", b""])
def test_other_files_are_kept(other: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("outputs/strategy/ckpt_strategy_rank_1.ckpt")
    file.parent.mkdir(parents=True)
    file.write_bytes(other)
    words = [*PREDICT, "only_save_strategy=true"]
    refused([*words, "parallel=tp2"], 2)
    assert "ckpt_strategy_rank_1.ckpt: exists, and is no strategy" in capsys.readouterr().err
    assert file.read_bytes() == other and len(list(file.parent.iterdir())) == 1


def test_strategies_of_an_earlier_run_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = Path("outputs/strategy"), [*PREDICT, "only_save_strategy=true"]
    file = "parallel.strategy_ckpt_save_file=./ckpt_strategy.ckpt"
    assert app.main([*words, "parallel=tp4", file]) == 0
    assert "replaced" not in capsys.readouterr().err
    (folder / "ckpt_strategy_rank_x.ckpt").write_text("mine")
    assert app.main([*words, "parallel=tp2", file]) == 0
    assert "replaced the strategies of an earlier run" in capsys.readouterr().err
    names = [f"ckpt_strategy_rank_{rank}.ckpt" for rank in (0, 1, "x")]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert read_strategy(folder / names[0]).ranks == 2


def test_strategies_of_the_checkpoint_that_is_read_stay(capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = Path("outputs/strategy"), [*PREDICT, "only_save_strategy=true"]
    assert app.main([*words, "parallel=tp4"]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    source = "src_strategy_path_or_dir=./outputs/strategy"
    refused([*words, "parallel=tp2", source, "load_checkpoint=x.ckpt", "auto_trans_ckpt=true"], 2)
    assert "and is a strategy of the checkpoint that is read" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
