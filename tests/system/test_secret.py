from __future__ import annotations

import os
from pathlib import Path

import pytest

from lite_runner.backends.workers.python import worker_environment
from lite_runner.config.argv import parse
from lite_runner.config.help import config_text
from lite_runner.config.sections import Cluster
from lite_runner.distributed import msrun
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve, schemas
from lite_runner.system.secret import (
    HIDDEN,
    encryption_key,
    hidden,
    read_key,
    take_key,
    without_keys,
)
from tests.each import each

KEY = "0123456789abcdef"


def test_a_key_comes_from_the_config_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    (tmp_path / "key").write_text(KEY + "\n")
    for given in (KEY, "env:MY_KEY", f"file:{tmp_path / 'key'}"):
        assert encryption_key(given) == KEY.encode()
    assert encryption_key("") is None
    assert encryption_key(KEY * 2) == 2 * KEY.encode()


def test_a_key_out_of_a_pipe_is_read_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, KEY.encode() + b"\n")
    os.close(writer)
    for _ in range(3):  # as when a config is validated, and then used
        assert encryption_key(f"file:/dev/fd/{reader}") == KEY.encode()
    os.close(reader)


def test_a_file_is_read_again(tmp_path: Path) -> None:
    for key in (KEY, KEY[::-1]):
        (tmp_path / "key").write_text(key)
        assert encryption_key(f"file:{tmp_path / 'key'}") == key.encode()


def test_the_variable_that_held_a_key_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELD_A_KEY", KEY)
    monkeypatch.setenv("LITE_RUNNER_TEST", "kept")
    assert "HELD_A_KEY" in without_keys(os.environ)
    encryption_key("env:HELD_A_KEY")
    for environ in (
        without_keys(os.environ),
        worker_environment(),
        msrun.environment(Path("events"), Path(), Cluster(2, 2), {}),
    ):
        assert "HELD_A_KEY" not in environ
        assert environ["LITE_RUNNER_TEST"] == "kept"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("short", "got 5 bytes, expected one of 16, 24, 32"),
        ("env:NO_SUCH_VARIABLE", "no environment variable NO_SUCH_VARIABLE"),
        ("file:/no/such/file", "cannot be read"),
        ("file:/dev/zero", "got 34 bytes"),
        (HIDDEN, "does not hold the key"),
    ],
)
def test_invalid_keys(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        encryption_key(given)


def test_a_file_shows_where_a_key_is_but_not_the_key() -> None:
    assert hidden(KEY) == HIDDEN
    assert [hidden(given) for given in ("", "env:A", "file:b")] == ["", "env:A", "file:b"]


EXPORT = ["run_mode=export", "model=tiny_llama"]


@each("typed", ["infer.enc_key", "infer.enc_kye", "+infer.enc_key", "enckey"])
@each("run_mode", ["export", "convert"])
def test_errors_show_no_secret(typed: str, run_mode: str) -> None:
    words = ["model=tiny_llama", f"run_mode={run_mode}", f"{typed}={KEY}"]
    with pytest.raises(ConfigError, match="seed") as caught:
        resolve(parse([*words, "seed=x"], heads()))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(("given", "shown"), [(KEY, HIDDEN), ("env:A", "env:A"), ("", "''")])
def test_cfg_shows_where_a_key_is_but_not_the_key(given: str, shown: str) -> None:
    text = config_text(
        parse([*EXPORT, f"infer.enc_key={given}", "--cfg", "job"], heads()), schemas()
    )
    assert f"enc_key: {shown}\n" in text.replace(f"'{HIDDEN}'", HIDDEN)


def test_the_key_is_read_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_KEY", "one")
    (tmp_path / "key").write_text("two\n")
    assert read_key("key", "") is None
    assert read_key("key", "env:SERVE_KEY") == b"one"
    assert read_key("key", "key") == read_key("key", "file:key") == b"two"
    (tmp_path / "empty").write_text("\n")
    for given in ("env:NOT_THERE", "nothing", "empty", "sk-the-key-itself"):
        with pytest.raises(ConfigError) as raised:
            read_key("key", given)
        assert "sk-" not in str(raised.value)


def test_a_key_that_is_taken_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    assert take_key("serve.api_key", "env:MY_KEY") == b"secret"
    assert "MY_KEY" not in os.environ
    assert take_key("serve.api_key", "") is None
