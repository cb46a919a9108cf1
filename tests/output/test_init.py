from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from lite_runner.errors import EXIT_ENVIRONMENT, ArtifactError, EnvironmentFault
from lite_runner.output import Result, RowResult, RunFolder, Timing, peak_rss_mib
from lite_runner.system.environment import versions
from lite_runner.system.yaml_file import dump_yaml

NOON = datetime(2026, 1, 31, 12, 0, 5)


def row(prompt: str = "I love", text: str = " Beijing") -> RowResult:
    return RowResult(prompt, text, [3, 5], 2, 2, "length")


def result(*rows: RowResult) -> Result:
    return Result(
        run_mode="predict",
        model="tiny_llama",
        backend="ms",
        engine="mindspore-graph",
        load_checkpoint="random",
        results=rows,
        timing=Timing(load_s=0.5),
    )


def make(base: Path) -> RunFolder:
    return RunFolder.create(base, "predict", "tiny_llama", now=NOON)


def test_folder_is_named_by_date_time_mode_and_model(tmp_path: Path) -> None:
    folder = make(tmp_path / "outputs")
    assert folder.path == tmp_path / "outputs/2026-01-31/120005-predict-tiny_llama"
    assert list(folder.path.iterdir()) == []  # the probe is gone
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_model_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "predict", "../../a b", now=NOON)
    assert folder.path == tmp_path / "2026-01-31" / "120005-predict-.._.._a_b"


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(make(tmp_path).path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 8
    assert (tmp_path / "latest").resolve() in paths
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2026-01-31", "latest"]


def test_latest_follows_and_is_relative(tmp_path: Path) -> None:
    make(tmp_path / "a")
    newest = make(tmp_path / "a")
    assert (tmp_path / "a/latest").readlink() == Path("2026-01-31", newest.path.name)
    (tmp_path / "a").rename(tmp_path / "b")
    assert (tmp_path / "b/latest").resolve() == tmp_path / "b/2026-01-31" / newest.path.name


def test_a_users_file_or_folder_named_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a/latest").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    for name in ("a/latest/mine.txt", "b/latest"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(EnvironmentFault, match="latest: no link to a run, but a file or fold"):
            make(tmp_path / name[0])
        assert (tmp_path / name).read_text() == "mine"


def test_output_dir_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault) as caught:
        make(tmp_path / "file" / "outputs")
    assert "file" in caught.value.message and "output_dir=" in caught.value.hint
    assert caught.value.exit_code == EXIT_ENVIRONMENT


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(EnvironmentFault, match=re.escape(os.strerror(number))) as caught:
        make(tmp_path)
    assert str(tmp_path / "2026-01-31") in caught.value.message
    assert list((tmp_path / "2026-01-31").iterdir()) == []  # no half-made run


def test_results_on_a_disk_that_filled_up(tmp_path: Path) -> None:
    """A process whose files may not grow beyond 2 MiB: a real refusal by the system."""
    script = f"""
import resource
from lite_runner.errors import EnvironmentFault
from lite_runner.output import *
folder = RunFolder.create({str(tmp_path)!r}, "predict", "tiny_llama")
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
row = RowResult("p", "x" * (3 << 20), [], 1, 1, "length")
try:
    folder.write_result(Result(run_mode="predict", model="m", backend="ms", engine="e",
                               load_checkpoint="c", results=[row], timing=Timing()))
except EnvironmentFault as fault:
    print(fault.message)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "result.json: File too large" in done.stdout, done.stderr
    assert list((tmp_path / "latest").iterdir()) == []


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)
    before = folder.write_result(result(row())).read_text()

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(EnvironmentFault, match="No space left"):
        folder.write_result(result(row(text=" Paris")))
    assert (folder.path / "result.json").read_text() == before
    assert [path.name for path in folder.path.iterdir()] == ["result.json"]  # and no empty texts


def test_result_json_has_the_schema(tmp_path: Path) -> None:
    path = make(tmp_path).write_result(result(row(text=" 北京\n")))
    assert "北京" in path.read_text(encoding="utf-8")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == [
        *("schema", "run_mode", "model", "backend", "engine", "world_size", "load_checkpoint"),
        *("config_file", "versions", "provenance", "results", "timing", "peak_rss_mib"),
    ]
    assert content["schema"] == 1 and content["config_file"] == "config.yaml"
    assert content["results"] == [
        {
            "prompt": "I love",
            "text": " 北京\n",
            "token_ids": [3, 5],
            "prompt_tokens": 2,
            "generated_tokens": 2,
            "finish_reason": "length",
            "adapter": None,
            "cached_tokens": 0,
        }
    ]
    assert content["timing"] == {
        "load_s": 0.5,
        **dict.fromkeys(("compile_s", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s")),
        **dict.fromkeys(
            ("time_to_first_token_s", "drafted_tokens", "accepted_tokens", "preemptions")
        ),
    }
    assert content["peak_rss_mib"] > 1


def test_answers_have_the_form_of_mindformers() -> None:
    rows = [row(), row(text=" 北京\n"), row("a=b 'q'", "!"), row("a=b 'q'", "?")]
    assert result(row()).answers() == [{"text_generation_text": ["I love Beijing"]}]
    assert result(*rows).answers(2) == [
        {"text_generation_text": ["I love Beijing", "I love 北京\n"]},
        {"text_generation_text": ["a=b 'q'!", "a=b 'q'?"]},
    ]
    assert result(row()).answers(chat=True) == [{"text_generation_text": [" Beijing"]}]


def test_a_prompt_that_was_no_utf8_is_kept_escaped(tmp_path: Path) -> None:
    prompt = os.fsdecode(b"caf\xe9")  # as sys.argv holds a Latin-1 argument
    path = make(tmp_path).write_result(result(row(prompt)))
    assert json.loads(path.read_bytes())["results"][0]["prompt"] == prompt


def test_config_round_trips_in_order(tmp_path: Path) -> None:
    config = {"seed": 0, "predict_data": ["a: b", "你好"], "model": {"arch": {"type": "X"}}}
    path = (
        RunFolder.create(tmp_path, "predict", "tiny_llama", dump_yaml(config)).path / "config.yaml"
    )
    assert "你好" in path.read_text(encoding="utf-8")
    assert list(yaml.safe_load(path.read_text(encoding="utf-8")).items()) == list(config.items())


def test_run_log_holds_what_is_logged_until_closed(tmp_path: Path) -> None:
    logger = logging.getLogger("lite_runner.somewhere")
    with make(tmp_path) as folder:
        folder.open_log()
        logger.info("loading 北京")
    logger.info("too late")
    folder.close()
    log = (folder.path / "run.log").read_text(encoding="utf-8")
    assert re.fullmatch(r"[\d\-]+ [\d:,]+ INFO lite_runner.somewhere: loading 北京\n", log)


def test_run_log_says_how_the_run_failed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError), make(tmp_path) as folder:
        folder.open_log()
        raise ArtifactError("x.safetensors is cut short", "download it again")
    log = (folder.path / "run.log").read_text(encoding="utf-8")
    assert log.endswith("x.safetensors is cut short\n  -> download it again\n")
    with pytest.raises(ZeroDivisionError), make(tmp_path) as folder:
        folder.open_log()
        _ = 1 / 0
    log = (folder.path / "run.log").read_text(encoding="utf-8")
    assert "ended by ZeroDivisionError\nTraceback" in log


def test_a_log_on_a_full_disk_does_not_stop_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "2026-01-31/120005-predict-tiny_llama/run.log"
    with make(tmp_path) as folder:
        path.symlink_to("/dev/full")  # takes no byte, as a full disk
        folder.open_log()
        logging.getLogger("lite_runner").warning("lost")
        assert folder.write_result(result(row())).exists()
    assert capfd.readouterr().err == ""


def test_versions_import_nothing() -> None:
    script = "import sys\nfrom lite_runner.system.environment import versions\n"
    script += "print(versions(), sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "'mindspore':" in done.stdout and "<module 'mindspore'" not in done.stdout
    assert set(versions()) == {"python", "lite_runner", "numpy", "mindspore"}
    assert versions()["python"] == sys.version.split()[0]


def test_peak_memory_is_in_mib() -> None:
    held = b"x" * (64 << 20)
    assert len(held) / 2**20 < peak_rss_mib()
    assert peak_rss_mib() == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, rel=0.1
    )


@pytest.mark.parametrize(("umask", "expected"), [(0o000, 0o640), (0o022, 0o640), (0o077, 0o600)])
def test_results_are_for_the_user_and_the_group(tmp_path: Path, umask: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        with RunFolder.create(tmp_path, "predict", "m", "{}") as folder:
            folder.open_log()
            folder.write_text("result.json", "{}")
            modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("config.yaml", "result.json", "run.log"), expected)
