from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.client import BadStatusLine
from pathlib import Path
from typing import Any

import pytest

from lite_runner import progress
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.weights import download as module
from lite_runner.weights.download import Remote, download, without_credentials
from tests.download_server import Behaviour, serving
from tests.paths import ROOT

CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Behaviour:
    return Behaviour(packages={"a": {"file": CONTENT, "other": CONTENT[::-1]}})


@pytest.fixture
def url(server: Behaviour, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    with serving(server) as address:
        yield f"{address}/wheels/a"


@pytest.fixture
def file(url: str, tmp_path: Path) -> Remote:
    return Remote(f"{url}/file", tmp_path / "cache" / "file", len(CONTENT), SHA256)


def test_files_arrive_together(file: Remote, url: str, server: Behaviour) -> None:
    other = Remote(f"{url}/other", file.target.with_name("other"))
    download([file, other], "both")
    assert file.target.read_bytes() == CONTENT
    assert other.target.read_bytes() == CONTENT[::-1]  # neither its size nor its digest was known
    assert sorted(path.name for path in file.target.parent.iterdir()) == ["file", "other"]
    download([file, other], "both")
    assert len(server.asked) == 2  # not once more


def test_a_broken_connection_is_taken_up_where_it_broke(file: Remote, server: Behaviour) -> None:
    server.cut = 100_000
    download([file], "it")
    assert file.target.read_bytes() == CONTENT
    assert [path.partition("=")[2] for path in server.asked] == ["", "100000-", "200000-"]
    assert server.sent == len(CONTENT)


@pytest.mark.parametrize("known", [True, False])
def test_bytes_that_have_arrived_are_not_sent_again(
    known: bool, file: Remote, server: Behaviour
) -> None:
    if not known:
        file = Remote(file.url, file.target)
    file.target.parent.mkdir()
    file.part.write_bytes(CONTENT[:250_000])
    download([file], "it")
    assert file.target.read_bytes() == CONTENT and server.sent == 50_000
    file.target.rename(file.part)  # all of it is here, but for its name
    asked = len(server.asked)
    download([file], "it")
    assert file.target.read_bytes() == CONTENT
    assert not known or len(server.asked) == asked


def test_another_file_is_refused_and_not_kept(file: Remote) -> None:
    file.target.parent.mkdir()
    file.part.write_bytes(b"another" * 1000)
    with pytest.raises(ArtifactError, match=f"expected {SHA256}") as caught:
        download([file], "it")
    assert caught.value.hint.startswith("run again to download it again")
    assert not list(file.target.parent.iterdir())
    download([file], "it")
    assert file.target.read_bytes() == CONTENT


def test_a_file_longer_than_announced_is_not_received_whole(
    file: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1000)
    with pytest.raises(ArtifactError, match=r"got 10,\d{3} bytes, expected 9,999"):
        download([Remote(file.url, file.target, 9_999, SHA256)], "it")
    assert not list(file.target.parent.iterdir())


def test_a_digest_of_git(file: Remote, url: str) -> None:
    blob = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    download([Remote(file.url, file.target, len(CONTENT), blob)], "it")
    with pytest.raises(ArtifactError, match="expected " + "0" * 40):
        download([Remote(file.url, file.target.with_name("b"), digest="0" * 40)], "it")


def test_an_answer_that_is_none_of_http_is_an_error_of_the_connection(
    file: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BadStatusLine("what")

    monkeypatch.setattr(module, "open_url", broken)
    with pytest.raises(OSError, match=r"got BadStatusLine\('what'\), expected an answer of HTTP"):
        download([file], "it")


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_is_final(status: int, file: Remote, server: Behaviour) -> None:
    server.status = status
    with pytest.raises(OSError, match=str(status)):
        download([file], "it")
    assert len(server.asked) == 1


def test_a_server_that_is_busy_is_asked_again(
    file: Remote, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = 503
    waits: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    with pytest.raises(OSError, match="503"):
        download([file], "it")
    assert len(server.asked) == module.ATTEMPTS
    assert waits == [0.5, 1.0, 2.0]


def test_a_server_that_never_answers(
    file: Remote, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.1)
    server.silent = True
    with pytest.raises(OSError, match="timed out"):
        download([file], "it")
    assert len(server.asked) == module.ATTEMPTS


def test_too_small_a_disk_is_reported_first(
    file: Remote, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        EnvironmentFault, match=r"too small .* of 0.3 MB: 0.2 MB are free"
    ) as caught:
        download([file], "it")
    assert "LITE_RUNNER_CACHE" in caught.value.hint and not server.asked
    file.part.write_bytes(CONTENT[:150_000])  # the rest has room
    download([file], "it")


def test_a_full_disk_is_no_network_error(
    file: Remote, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        EnvironmentFault, match=f"{file.part}: .* No space left on device"
    ) as caught:
        download([file], "it")
    assert "LITE_RUNNER_CACHE" in caught.value.hint and len(server.asked) == 1


def test_credentials_go_to_their_host_alone(
    file: Remote, url: str, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "Basic " + base64.b64encode(b"me:p@ss").decode()
    address = url.replace("://", "://me:p%40ss@")
    download([Remote(f"{address}/file", file.target, len(CONTENT), SHA256)], "it")
    assert file.target.read_bytes() == CONTENT
    masked = "http://***@host/x and https://***@b:1/y, not http://host/a@b"
    plain = "http://me:secret@host/x and https://tok@b:1/y, not http://host/a@b"
    assert without_credentials(plain) == masked


def test_speed_and_time_left(
    file: Remote, server: Behaviour, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(progress, "SPEED_S", 0.0)
    monkeypatch.setattr(progress, "PLAIN_LINE_S", 0.0)
    monkeypatch.setattr(progress, "PLAIN_LINE_SHARE", 0.0)
    file.target.parent.mkdir()
    file.part.write_bytes(CONTENT[:100_000])
    download([file], "it")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("download it: 0.1 of 0.3 MB (33%)")
    assert any("MB/s, 0 s left" in line for line in lines)
    assert lines[-1].startswith("download it: 0.3 MB in ")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lite_runner.weights.download import one_process"
        "\nwith one_process(Path(sys.argv[1]), 'it'): print('mine', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as one:
        assert one.stdout is not None and one.stdout.readline() == "mine\n"
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as other:
            assert other.stderr is not None
            assert other.stderr.readline() == "waiting for another process, which downloads it\n"
            one.communicate("\n")
            assert other.communicate("\n")[0] == "mine\n"
