"""scripts/ascend_smoke.sh over a stand-in for Python: its commands, and its file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import pytest

from tests.paths import ROOT

SECRET = "hf_abcdefgh12345678"
PYTHON = """#!/bin/sh
echo "called: $*"
seq 1 60
case "$*" in
  *quant=*) echo "no such operator" >&2; exit 3 ;;
  *parallel=tp2*) sleep 30 ;;
  *"export a"*|*run_mode=export*) echo "$HOME/models of $(hostname) at 10.1.2.3 for me@there.org" ;;
  *engine=lite*) echo "HF_TOKEN=%s password: open" ;;
esac
"""


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The file that is sent back, and what was on the screen."""
    checkout = tmp_path_factory.mktemp("smoke")
    (checkout / "scripts").mkdir()
    for name in ("ascend_smoke.sh", "own_python.sh"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts" / name)
    stand_ins = {".venv/bin/python": PYTHON % SECRET, "bin/npu-smi": "#!/bin/sh\necho 910B3\n"}
    for name, text in stand_ins.items():
        path = checkout / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    home = checkout / "home of somebody"
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "SECONDS_EACH": "3",
        "HCCL_IF_IP": "10.1.2.3",
        "MS_TOKEN_OF_MINE": SECRET,
    }
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / "ascend_smoke.sh"), "out.txt"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return (checkout / "out.txt").read_text(), done.stderr


def test_all_ten_run_whatever_the_status_of_one(sent: tuple[str, str]) -> None:
    text, screen = sent
    assert [f"== {number}. " in text for number in range(1, 11)] == [True] * 10
    assert "exit code: 3, seconds: " in text and "  | 60" in text and "  | 30\n" not in text
    assert "exit code: 124 (longer than 3 s), seconds: " in text
    assert text.count("exit code: 0, seconds: ") == 8
    assert text.rstrip().endswith("== 8 of 10 ended with 0")
    assert "8 of 10 ended with 0; send back " in screen


def test_each_command_is_a_run_on_the_card(sent: tuple[str, str]) -> None:
    runs = [line for line in sent[0].splitlines() if line.startswith("command: ")]
    assert len(runs) == 10
    assert all("context.device_target=Ascend" in line for line in runs[:9])
    assert "mindspore_lite" in runs[9]
    assert "910B3" in sent[0]


def test_the_file_does_not_identify_its_sender(sent: tuple[str, str]) -> None:
    text = sent[0]
    for private in (SECRET, "10.1.2.3", "me@there.org", "home of somebody", "open", "smoke0"):
        assert private not in text
    assert f" {socket.gethostname()} " not in text
    assert "max_new_tokens=8" in text
    assert "HOME/models of HOST at ADDRESS for ADDRESS" in text
