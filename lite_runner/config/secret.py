"""The key of an encrypted MindIR, which stands in no file that a run writes.

The process that a user starts reads it, and gives it to the ranks that it starts. None of its
processes has the environment variable that held the key.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner.config.suggest import NEAR_NAME, nearest
from lite_runner.config.yaml_file import at
from lite_runner.errors import ConfigError

KEY = "infer.enc_key"
LENGTHS = (16, 24, 32)  # bytes; what AES takes
HIDDEN = "hidden: give it again"  # in place of a key in the config of a run

_told: dict[str, bytes] = {}  # by what is given: keys that another process has read
_pipes: dict[tuple[int, int] | None, bytes] = {}  # by device and inode: they are read once
_variables: set[str] = set()  # of the environment, that held a key


def encryption_key(given: str) -> bytes | None:
    """The key that `infer.enc_key` names: itself, env:NAME or file:PATH; None for "".

    Raises ConfigError, which never shows the key, where it is not to be had or of a wrong length.
    """
    if not given:
        return None
    if given in _told:
        return _told[given]
    if given == HIDDEN:
        raise ConfigError(f"{KEY}: the config of a run does not hold the key", f"{KEY}=env:NAME")
    kind, _, name = given.partition(":")
    if kind == "env":
        value = os.environ.get(name)
        if value is None:
            raise ConfigError(f"{KEY}={given}: no environment variable {name}")
        key = value.encode()
        _variables.add(name)
    elif kind == "file":
        try:
            key = _in_file(Path(name).expanduser())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{KEY}={given}: cannot be read: {error}") from None
    else:
        key = given.encode()
    if len(key) not in LENGTHS:
        lengths = ", ".join(map(str, LENGTHS))
        raise ConfigError(f"{KEY}: got {len(key)} bytes, expected one of {lengths}")
    return key


def _in_file(path: Path) -> bytes:
    found = path.stat()
    pipe = (found.st_dev, found.st_ino) if stat.S_ISFIFO(found.st_mode) else None
    if pipe in _pipes:
        return _pipes[pipe]
    with path.open("rb") as file:
        key = file.read(max(LENGTHS) + 2).rstrip(b"\r\n")
    if pipe is not None:
        _pipes[pipe] = key
    return key


def read_keys(config: Mapping[str, Any]) -> dict[str, str]:
    """The key of a config, as plain data, in hex by how it is given: for `remember` elsewhere."""
    given = at(config, KEY) or ""
    key = encryption_key(given)
    return {given: key.hex()} if key else {}


def remember(keys: Mapping[str, str]) -> None:
    """Take keys from another process's `read_keys`: `encryption_key` reads them no more."""
    _told.update((given, bytes.fromhex(key)) for given, key in keys.items())


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for another process: without the variables that held a key."""
    return {name: value for name, value in environ.items() if name not in _variables}


def hidden(given: str) -> str:
    """What may be shown of `infer.enc_key`: where the key is, but not the key."""
    return given if not given or given.startswith(("env:", "file:")) else HIDDEN


def means_key(name: str) -> bool:
    """Whether a dotted key is `infer.enc_key`, or that misspelt: its value may be a key."""
    return nearest(name.rpartition(".")[2], [KEY.rpartition(".")[2]], NEAR_NAME) is not None
