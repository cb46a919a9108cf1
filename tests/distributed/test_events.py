"""A rank's end of its connection to the launcher, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.errors import EXIT_FAILED

RANK = """
import sys, time
from pathlib import Path
from lite_runner.distributed.events import Sender
Sender(Path(sys.argv[1]), 0)
time.sleep(600)
"""


@pytest.mark.parametrize("unread", [True, False])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, unread: bool) -> None:
    path = tmp_path / "events"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.bind(str(path))
        launcher.listen()
        with subprocess.Popen([sys.executable, "-c", RANK, str(path)]) as rank:
            try:
                connection, _ = launcher.accept()
                # Unread events make of the end a reset, which is an error of recv.
                connection.recv(1, socket.MSG_PEEK if unread else 0)
                if not unread:
                    connection.recv(1 << 16)
                connection.close()
                assert rank.wait(60) == EXIT_FAILED
            finally:
                rank.kill()
