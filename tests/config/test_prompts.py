from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config import prompts
from lite_runner.config.prompts import read_prompts
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

Resolve = Callable[..., RunConfig]
TINY = "model=tiny_llama"


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_terminal_is_told_what_is_waited_for(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, verbosity, told in ((True, 1, True), (True, 0, False), (False, 1, False)):
        feed(monkeypatch, b"hi\n")
        monkeypatch.setattr("sys.stdin.isatty", lambda terminal=terminal: terminal)
        config = resolve(TINY, "predict_data=-", f"verbosity={verbosity}")
        assert read_prompts(config) == ["hi"]
        assert ("type the prompt; Ctrl-D" in capsys.readouterr().err) == told


def test_a_text_and_a_list(resolve: Resolve) -> None:
    assert read_prompts(resolve(TINY, "predict_data= a\n")) == [" a\n"]
    assert read_prompts(resolve(TINY, "predict_data=['a.txt','b']")) == ["a.txt", "b"]
    assert read_prompts(resolve(TINY, "predict_data=-x")) == ["-x"]
    assert read_prompts(resolve(TINY, "predict_data=see\na.txt")) == ["see\na.txt"]
    assert read_prompts(resolve(TINY, "dry_run=true")) == []


def test_a_file_holds_a_prompt_a_line(resolve: Resolve, tmp_path: Path) -> None:
    file = tmp_path / "my prompts=1.txt"
    file.write_bytes("\ufeffone \r\n\n  \n两 行\u2028x\nlast".encode())
    config = resolve(TINY, f"predict_data={file}")
    assert read_prompts(config) == ["one ", "两 行\u2028x", "last"]


def test_a_backslash_and_an_n_break_a_line_in_a_file_alone(
    resolve: Resolve, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\\ntwo\nthree\n", encoding="utf-8")
    assert read_prompts(resolve(TINY, f"predict_data={file}")) == ["one\ntwo", "three"]
    assert read_prompts(resolve(TINY, "predict_data=one\\ntwo")) == ["one\\ntwo"]
    assert read_prompts(resolve(TINY, "--predict_data", "one\\ntwo")) == ["one\ntwo"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "has no lines"),
        (b"\n \n", "has no lines"),
        (b"ok\n\xff\xfe", "is not UTF-8: byte 0xff at 3"),
    ],
)
def test_a_file_without_prompts_is_refused(
    resolve: Resolve, tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "p.txt").write_bytes(content)
    config = resolve(TINY, f"predict_data={tmp_path}/p.txt")
    with pytest.raises(ConfigError, match=expected):
        read_prompts(config)


def test_a_file_that_vanished_is_refused(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("x", encoding="utf-8")
    config = resolve(TINY, f"predict_data={tmp_path}/p.txt")
    (tmp_path / "p.txt").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(config)


def test_a_file_that_is_too_large_is_refused(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 3)
    (tmp_path / "p.txt").write_text("four", encoding="utf-8")
    with pytest.raises(ConfigError, match="more than 3 bytes"):
        read_prompts(resolve(TINY, f"predict_data={tmp_path}/p.txt"))


def test_standard_input_is_one_prompt(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(TINY, "predict_data=-")
    feed(monkeypatch, "两行\nsecond\n\n".encode())
    assert read_prompts(config) == ["两行\nsecond\n"]
    feed(monkeypatch, b"\n")
    with pytest.raises(ConfigError, match="standard input is empty"):
        read_prompts(config)
    feed(monkeypatch, b"\xff")
    with pytest.raises(ConfigError, match="standard input is not UTF-8"):
        read_prompts(config)


def test_a_home_folder_is_expanded(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    (tmp_path / "p.txt").write_text("home", encoding="utf-8")
    assert read_prompts(resolve(TINY, "predict_data=~/p.txt")) == ["home"]
