"""What the ranks of a machine are given, under a real msrun: a key reaches them unseen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lite_runner import launch, launch_ranks
from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.errors import ArtifactError
from lite_runner.plan.plan import Plan
from lite_runner.run_modes import heads, resolve
from lite_runner.shared_plan import read_plan

KEY = "0123456789abcdef"
# Each rank writes what it has of the key, and what anybody may see of the rank.
RANK = """
import os, sys
from pathlib import Path
if os.environ["MS_ROLE"] == "MS_WORKER":
    import json
    from lite_runner.config.secret import encryption_key
    from lite_runner.distributed.events import MET, connect
    from lite_runner.shared_plan import read_plan
    rank = int(os.environ["RANK_ID"])
    plan = read_plan(Path(sys.argv[1]))
    found = {"key": encryption_key(plan.config.infer.enc_key).decode(), "argv": sys.argv}
    found["environ"] = dict(os.environ)
    Path(sys.argv[2], f"rank_{rank}.json").write_text(json.dumps(found))
    connect(rank).stage(MET)
    connect(rank).done()
else:
    import time
    time.sleep(600)  # it is ended with the job
"""


def test_a_changed_shard_ends_the_run_before_its_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=tiny_llama", "parallel=tp2"]
    assert main(["run_mode=shard", *words, "shard_output=cut"]) == 0
    started: list[bool] = []

    def start(program: Sequence[str], *_: object, **__: object) -> None:
        plan = read_plan(Path(program[1]))
        started.append(plan.model.verified)

    monkeypatch.setattr(launch_ranks, "run_ranks", start)
    words += ["load_checkpoint=cut", "predict_data=[hi]", "output_dir=out", "backend=ms"]
    config = resolve(parse(words, heads()))[0]
    launch.launch(config)
    assert started == [True]
    file = Path("cut/rank_1/checkpoint_1.ckpt")
    content = bytearray(file.read_bytes())
    content[-700] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"checkpoint_1\.ckpt: another file than the one"):
        launch.launch(config)
    assert started == [True]


@pytest.mark.parametrize("source", ["env", "file", "itself"])
def test_a_key_reaches_the_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("OF_THE_RUN", KEY)
    (tmp_path / "key").write_text(KEY)
    given = {"env": "env:OF_THE_RUN", "file": f"file:{tmp_path}/key", "itself": KEY}[source]
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    monkeypatch.setattr(launch_ranks, "plan_for_ranks", lambda config: Plan(config=config))
    monkeypatch.setattr(launch_ranks, "RANK_PROGRAM", program)
    words = ["model=tiny_llama", "backend=mslite", "predict_data=[hi,ho]", "parallel=dp2"]
    words += ["export.layout=static_pair", f"infer.enc_key={given}", f"output_dir={tmp_path}/out"]
    config = resolve(parse(words, heads()))[0]
    launch.launch(config)
    folder = (tmp_path / "out/latest").resolve()
    for rank in range(2):
        file = folder / f"rank_{rank}.json"
        found = json.loads(file.read_text())
        assert found.pop("key") == KEY
        assert KEY not in json.dumps(found)
        assert not Path(found["argv"][1]).exists()
        file.unlink()
    for file in folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    assert ("OF_THE_RUN" in (folder / "config.yaml").read_text()) is (source == "env")
