from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.help import config_text
from lite_runner.config.secret import HIDDEN, encryption_key, hidden
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve, schemas

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
def test_what_is_no_key(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        encryption_key(given)


def test_a_file_shows_where_a_key_is_but_not_the_key() -> None:
    assert hidden(KEY) == HIDDEN
    assert [hidden(given) for given in ("", "env:A", "file:b")] == ["", "env:A", "file:b"]


EXPORT = ["run_mode=export", "model=tiny_llama"]


@pytest.mark.parametrize("typed", ["infer.enc_key", "infer.enc_kye", "+infer.enc_key", "enckey"])
@pytest.mark.parametrize("run_mode", ["export", "convert"])
def test_no_fault_shows_a_key(typed: str, run_mode: str) -> None:
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
