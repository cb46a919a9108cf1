"""All checks on this machine, in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lite_runner.distributed.events import SOCKET_VARIABLE

PROGRAM = """
import sys
from pathlib import Path
from lite_runner.app import guarded
def run():
    from lite_runner.doctor import checkup
    return 0 if checkup.run(checkup.machine_checks(Path("outputs"), None), sys.argv[1]) else 3
sys.exit(guarded(run))
"""


def started(tmp_path: Path, form: str) -> subprocess.Popen[str]:
    """The doctor, with its temporary files in tmp_path/tmp."""
    (tmp_path / "tmp").mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(program), form],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def left(tmp_path: Path) -> list[psutil.Process]:
    """Ranks, or what started them, that still live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(SOCKET_VARIABLE, "").startswith(str(tmp_path)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_whole_on_this_machine(tmp_path: Path) -> None:
    with started(tmp_path, "json") as process:
        output, errors = process.communicate()
    document = json.loads(output)
    status = {check["name"]: check["status"] for check in document["checks"]}
    for name in ("python", "numpy", "import mindspore", "memory", "port", "msrun"):
        assert status[name] == "ok", document
    assert document["ok"] is ("fail" not in status.values())
    assert (process.returncode, errors) == (0 if document["ok"] else 3, "")
    assert {one.name for one in tmp_path.iterdir()} == {"tmp", "program.py"}  # no run folder
    assert list((tmp_path / "tmp").iterdir()) == []
    assert left(tmp_path) == []


def test_ctrl_c_ends_it_with_what_there_is_and_leaves_no_rank(tmp_path: Path) -> None:
    with started(tmp_path, "text") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = ""
        while "\nok    port " not in told:  # the next check starts ranks
            line = process.stdout.readline()
            assert line, told
            told += line
        while not left(tmp_path):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert (process.returncode, rest) == (130, "")
    assert errors.endswith("interrupted\n")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert left(tmp_path) == []
