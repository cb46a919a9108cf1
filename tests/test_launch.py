"""Arguments and environment of the ranks that a run starts, under a real msrun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lite_runner import launch
from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.plan import Plan
from lite_runner.run_modes import heads, resolve
from lite_runner.system.files import cache_dir

KEY = "0123456789abcdef"
# Each rank writes what it has of the run and of the key, and what anybody may see of the rank.
RANK = """
import os, sys
from pathlib import Path
if os.environ["MS_ROLE"] == "MS_WORKER":
    import json
    from lite_runner.config.argv import parse
    from lite_runner.system.secret import encryption_key
    from lite_runner.distributed.events import FOLDER_VARIABLE, MET, connect
    from lite_runner.run_modes import heads, resolve
    rank = int(os.environ["RANK_ID"])
    config, notes = resolve(parse(sys.argv[1:], heads()))
    found = {"key": encryption_key(config.infer.enc_key).decode(), "argv": sys.argv}
    found["environ"] = dict(os.environ)
    found["config"] = config.to_dict()
    folder = os.environ[FOLDER_VARIABLE]
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
    connect(rank).stage(MET)
    connect(rank).done()
else:
    import time
    time.sleep(600)  # it is ended with the job
"""


@pytest.mark.usefixtures("light_msrun")
@pytest.mark.parametrize("source", ["env", "file", "itself"])
def test_the_config_and_the_key_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    if source == "env":
        monkeypatch.setenv("OF_THE_RUN", KEY)
    (tmp_path / "key").write_text(KEY)
    given = {"env": "env:OF_THE_RUN", "file": f"file:{tmp_path}/key", "itself": KEY}[source]
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    mode = SimpleNamespace(plan=lambda config: Plan(config=config))
    monkeypatch.setattr(launch, "run_mode", lambda name: mode)
    monkeypatch.setattr(launch, "check_ranks_fit", lambda plan: None)
    monkeypatch.setattr(launch, "RANK_PROGRAM", program)
    words = ["model=tiny_llama", "backend=mslite", "predict_data=[hi,ho]", "parallel=dp2"]
    words += ["export.layout=static_pair", f"infer.enc_key={given}", f"output_dir={tmp_path}/out"]
    config = resolve(parse(words, heads()))[0]
    launch.launch(config, plugins=["a,b.py"])
    folder = (tmp_path / "out/latest").resolve()
    for rank in range(2):
        file = folder / f"rank_{rank}.json"
        found = json.loads(file.read_text())
        theirs = found.pop("config")
        where = theirs["infer"].pop("enc_key").removeprefix("file:")
        own = config.to_dict()
        own["parallel"]["rank_table_file"] = ""
        del own["infer"]["enc_key"]
        assert theirs == own
        assert found.pop("key") == KEY and not Path(where).exists()
        assert KEY not in json.dumps(found)
        assert found["argv"][1:3] == ["--config", str(folder / "config.yaml")]
        assert found["argv"][-1] == f"register_path={Path.cwd()}/a,b.py"
        file.unlink()
    for file in folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    assert ("OF_THE_RUN" in (folder / "config.yaml").read_text()) is (source == "env")


HI = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=2")


def run(*words: str) -> None:
    assert main(list(words)) == 0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))


def old_entry(name: str) -> Path:
    folder = cache_dir() / name
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(bytes(2_000_000))
    os.utime(folder, times=(1_000_000_000,) * 2)
    return folder


def test_entries_beyond_the_limit_are_removed_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = old_entry("graphs/old")
    other = old_entry("artifacts/other")
    run(*HI)
    run(*HI, "context.cache_limit=1GB")
    assert old.is_dir() and other.is_dir() and "cache_limit" not in capsys.readouterr().err
    run(*HI, "context.cache_limit=0.003GB")
    stderr = capsys.readouterr().err
    assert "removed from the cache, least recently used: artifacts/other (2.0 MB)" in stderr
    assert "context.cache_limit=0.003GB" in stderr
    assert old.is_dir() and not other.exists()


@pytest.mark.usefixtures("unverified")
def test_an_export_that_the_run_uses_stays() -> None:
    offline = (*HI, "backend=mslite", "engine=graph-cell", "context.cache_limit=0.000001GB")
    offline += ("model.model_config.num_layers=1",)
    run(*offline)
    (export,) = (cache_dir() / "artifacts").iterdir()
    os.utime(export, times=(1_000_000_000,) * 2)
    run(*offline)  # it is used again
    assert list((cache_dir() / "artifacts").iterdir()) == [export]
    assert export.stat().st_mtime > 1_000_000_000


@pytest.mark.parametrize("size", ["10", "0GB", "10MB", "-1GB"])
def test_a_size_that_is_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HI, f"context.cache_limit={size}"]) == 2
    assert "context.cache_limit: got" in capsys.readouterr().err
