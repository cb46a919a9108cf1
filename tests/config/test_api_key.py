"""Keys of servers: where they are read from, and that no message shows one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.config.api_key import read_key
from lite_runner.errors import ConfigError


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
