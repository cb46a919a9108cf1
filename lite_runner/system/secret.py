"""Keys that a config only points to: of an encrypted MindIR, and of a server.

No file that a run writes holds them. The process that a user starts reads the key of a MindIR, and
gives it to the ranks that it starts; none of its processes has the variable that held the key.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from lite_runner.errors import ConfigError

KEY = "infer.enc_key"
SECRETS = (KEY, "serve.api_key", "server_key")  # keys that take env:NAME
LENGTHS = (16, 24, 32)  # bytes; what AES takes
HIDDEN = "hidden: give it again"  # in place of a key in the config of a run

_pipes: dict[tuple[int, int] | None, bytes] = {}  # by device and inode: they are read once
_variables: set[str] = set()  # of the environment, that held a key


def encryption_key(given: str) -> bytes | None:
    """The key that `infer.enc_key` names: itself, env:NAME or file:PATH; None for "".

    Raises ConfigError, which never shows the key, where it is not to be had or of a wrong length.
    """
    if not given:
        return None
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


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for another process: without the variables that held a key."""
    return {name: value for name, value in environ.items() if name not in _variables}


def hidden(given: str) -> str:
    """`infer.enc_key` for display: where the key is, but not the key."""
    return given if not given or given.startswith(("env:", "file:")) else HIDDEN


MAX_BYTES = 4096


def read_key(name: str, given: str) -> bytes | None:
    """The key that the config key `name` leads to: env:NAME, or a file; None for "".

    Raises ConfigError, which never shows the key.
    """
    if not given:
        return None
    kind, _, variable = given.partition(":")
    if kind == "env":
        key = os.environ.get(variable, "").encode()
        if not key:
            raise ConfigError(f"{name}={given}: no environment variable {variable}, or empty")
        return key
    path = Path(given.removeprefix("file:")).expanduser()
    try:
        with path.open("rb") as file:
            key = file.read(MAX_BYTES + 1).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: cannot be read from the file it names: {type(error).__name__}",
            f"{name}=env:NAME, or the path of a file that holds the key",
        ) from None
    if not 0 < len(key) <= MAX_BYTES:
        raise ConfigError(f"{name}: {path} is empty or has more than {MAX_BYTES} bytes")
    return key


def take_key(name: str, given: str) -> bytes | None:
    """`read_key`, and removes its variable from the environment of later processes."""
    key = read_key(name, given)
    kind, _, variable = given.partition(":")
    if kind == "env":
        del os.environ[variable]
    return key


def named_keys(given: bytes | None) -> dict[str, bytes]:
    """Keys by their names: one line is a key, several are a name and a key each. Raises
    ConfigError, which never shows them."""
    whole = [line.strip() for line in (given or b"").splitlines() if line.strip()]
    if len(whole) == 1:
        return {"default": whole[0]}
    lines = [line.split() for line in whole]
    named = {line[0].decode(errors="replace"): line[-1] for line in lines}
    if any(len(line) != 2 for line in lines) or not len(lines) == len(named) == len(
        set(named.values())
    ):
        raise ConfigError(
            "serve.api_key: several keys are lines of a name and a key each, none of them twice",
            "such as alice 0123456789abcdef",
        )
    return named
