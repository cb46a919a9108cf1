from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.system import files
from lite_runner.system.files import (
    MAX_DIGITS,
    MAX_JSON_DEPTH,
    atomic_write,
    make_folder,
    new_folder,
    parse_json,
    read_json,
    read_json_object,
    require_space,
)

# Makes what its first argument names, below the second, says so, and waits to be killed.
CHILD = """
import sys, time
from pathlib import Path
from lite_runner.system.files import atomic_write, new_folder, temporary_folder
make, target = sys.argv[1], Path(sys.argv[2], "target")
context = {
    "temporary_folder": lambda: temporary_folder("any", target.parent),
    "atomic_write": lambda: atomic_write(target),
    "new_folder": lambda: new_folder(target),
}[make]()
with context as output:
    if make == "atomic_write":
        output.write(b"half")
        output.flush()
    else:
        (output / "file").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def orphaned(kind: str, folder: Path, *, kill: bool = True) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    if kill:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    return child


# Replaces the folder `set` by `other`, and is killed beside one of the system's renames.
SWAP = """
import os, shutil, signal, sys
from pathlib import Path
from lite_runner.system import files

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def rename(self, target, rename=Path.rename):
    rename(self, target)
    die()

def exchange(one, other, exchange=files._exchange):
    if sys.argv[1] == "before":
        die()
    done = exchange(one, other)
    if done:
        die()
    return done

files._exchange, Path.rename = exchange, rename
with files.new_folder(Path("set")) as fresh:
    shutil.copytree("other", fresh, dirs_exist_ok=True)
"""


@pytest.mark.parametrize(("when", "stands"), [("before", "set"), ("behind", "other")])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_killed_while_names_are_swapped(tmp_path: Path, when: str, stands: str, kind: str) -> None:
    """There is no moment in which neither stands there: two renames would have one."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/name").write_text("other")
    old = tmp_path / "set"
    if kind == "folder":
        old.mkdir()
        old = old / "name"
    old.write_text("set")
    died = subprocess.run([sys.executable, "-c", SWAP, when], cwd=tmp_path)
    assert died.returncode == -signal.SIGKILL
    now = tmp_path / "set" if (tmp_path / "set").is_file() else tmp_path / "set/name"
    assert now.read_text() == stands


def age(folder: Path) -> None:
    then = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (then, then))


@pytest.mark.parametrize("kind", ["temporary_folder", "atomic_write", "new_folder"])
def test_leftovers_of_a_killed_run_are_removed_by_the_next(kind: str, tmp_path: Path) -> None:
    orphaned(kind, tmp_path)
    (left,) = tmp_path.iterdir()
    files.remove_orphans(tmp_path)
    assert left.exists(), "as young as one that is being made"
    age(tmp_path)
    with new_folder(tmp_path / "other") as fresh:
        (fresh / "file").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("kind", ["temporary_folder", "atomic_write", "new_folder"])
def test_cache_entries_in_use_are_kept(kind: str, tmp_path: Path) -> None:
    child = orphaned(kind, tmp_path, kill=False)
    try:
        age(tmp_path)
        with atomic_write(tmp_path / "other") as file:
            file.write(b"x")
        (used,) = tmp_path.glob(".*")
        assert used.exists()
    finally:
        orphan = child.stdout
        child.kill()
        child.wait()
        assert orphan is not None
        orphan.close()


def test_files_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".file.1.tmp", "file.lite_runner", ".other.partial"):
        (tmp_path / name).write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / ".link.lite_runner").symlink_to(tmp_path / "outside")
    age(tmp_path)
    before = sorted(tmp_path.iterdir())
    files.remove_orphans(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / ".mine.lite_runner").mkdir()
    age(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    files.remove_orphans(tmp_path)
    assert (tmp_path / ".mine.lite_runner").exists()


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    for folder in ("link", "link/below"):
        with pytest.raises(EnvironmentFault, match="link is a link to gone, which does not exist"):
            make_folder(tmp_path / folder)
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        ((1 << 20) - 1, 1 << 30, "0 MiB free, 1 MiB needed"),
        (0, 0, "holds no files of users"),  # /sys, /proc
    ],
)
def test_too_little_space(
    free: int, total: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=total))
    with pytest.raises(EnvironmentFault, match=expected):
        require_space(tmp_path, 1 << 20)


def test_a_file_in_memory_is_for_other_processes_and_gone_after_it() -> None:
    with files.memory_file("plan", b"x" * 100_000) as path:
        for _ in range(2):
            shown = subprocess.run(["cat", path], capture_output=True, check=True)
            assert shown.stdout == b"x" * 100_000
        open_there = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, check=True)
        assert b"memfd:plan" not in open_there.stdout
    assert not path.exists()


BROKEN = [
    (b"{", "Expecting property name"),
    (b"", "Expecting value"),
    (b"\xff", "can't decode byte 0xff"),
    (b'"\xed\xa0\x80"', "can't decode byte 0xed"),  # a surrogate, encoded
    (b"[" * 100_000, "nested too deeply"),
    (b"[" * 900 + b"]" * 900, "nested too deeply"),
    (b'{"a":' * 500 + b"1" + b"}" * 500, "nested too deeply"),
    (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
    (b'[{"b": {"a": 1, "c": 2, "a": 3}}]', "the key 'a' occurs twice"),
    (b"[NaN]", "NaN is not a JSON number"),
    (b"[Infinity]", "Infinity is not a JSON number"),
    (b"[-Infinity]", "-Infinity is not a JSON number"),
    (b"1e999", "1e999 is out of the range of floats"),
    (b"-1e999", "-1e999 is out of the range of floats"),
    (b"1" * 401, "a number of 401 digits"),
    (b"-" + b"1" * 5000, "a number of 5001 digits"),
    (rb'"\ud83d"', "half of a surrogate pair"),
    (rb'{"a": ["x", {"b\udc00": 1}]}', "half of a surrogate pair"),
    (rb'{"\uD83D": 1}', "half of a surrogate pair"),
]


@pytest.mark.parametrize(("data", "expected"), BROKEN)
def test_broken_files_are_reported_in_one_line(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as error:
        read_json(path, "a manifest", hint="write it again")
    message = error.value.message
    assert message.startswith(f"{path}: not a manifest: ")
    assert expected in message
    assert "\n" not in message
    message.encode()
    assert len(message) < len(str(path)) + 200
    assert error.value.hint == "write it again"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, expected in [
        (tmp_path / "none.json", "none.json: cannot be read: No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "a\0b", "null byte"),
    ]:
        with pytest.raises(ArtifactError, match=expected):
            read_json(path)
    large = tmp_path / "large.json"
    large.write_text(" " * 1000 + "1")
    assert read_json(large, most=1001) == 1
    with pytest.raises(ArtifactError, match=r"large\.json: not valid JSON: more than 1,000 bytes"):
        read_json(large, most=1000)


def test_an_object_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("[]")
    with pytest.raises(
        ArtifactError, match=r"some\.json: not valid JSON: a JSON list, expected an object"
    ):
        read_json_object(path)
    path.write_text('{"a": []}')
    assert read_json_object(path) == {"a": []}


def test_valid_json_is_parsed() -> None:
    assert parse_json(rb'"\ud83d\ude00 \\ud83d"') == "\U0001f600 \\ud83d"
    assert parse_json(b"\xef\xbb\xbf[1.5, 1e-999, 1e5, -3, true, null]") == [
        *(1.5, 0.0, 1e5, -3, True, None)
    ]
    assert parse_json("1000000000000000019884624838656") == 10**30 + 19884624838656
    assert parse_json("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH) is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES | st.text(st.characters()))
def test_values_come_back_or_are_refused(value: Any) -> None:
    text = json.dumps(value)
    try:
        found = parse_json(text)
    except ValueError as error:
        assert any(word in str(error) for word in ("not a JSON number", "half of"))
    else:
        assert found == value
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


@given(st.binary(max_size=50) | st.text('[]{}"\\ud8:,019eE.-NaInfity ', max_size=50))
def test_any_bytes_are_read_or_refused(data: bytes | str) -> None:
    try:
        found = parse_json(data)
    except ValueError:
        return
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
