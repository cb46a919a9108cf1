"""The key of an encrypted MindIR, which stands in no file that a run writes."""

from __future__ import annotations

import os
from pathlib import Path

from lite_runner.config.suggest import NEAR_NAME, nearest
from lite_runner.errors import ConfigError

KEY = "infer.enc_key"
LENGTHS = (16, 24, 32)  # bytes; what AES takes
HIDDEN = "hidden: give it again"  # in place of a key in the config of a run


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
    elif kind == "file":
        try:
            with Path(name).expanduser().open("rb") as file:
                key = file.read(max(LENGTHS) + 2).rstrip(b"\r\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{KEY}={given}: cannot be read: {error}") from None
    else:
        key = given.encode()
    if len(key) not in LENGTHS:
        lengths = ", ".join(map(str, LENGTHS))
        raise ConfigError(f"{KEY}: got {len(key)} bytes, expected one of {lengths}")
    return key


def hidden(given: str) -> str:
    """What may be shown of `infer.enc_key`: where the key is, but not the key."""
    return given if not given or given.startswith(("env:", "file:")) else HIDDEN


def means_key(name: str) -> bool:
    """Whether a dotted key is `infer.enc_key`, or that misspelt: its value may be a key."""
    return nearest(name.rpartition(".")[2], [KEY.rpartition(".")[2]], NEAR_NAME) is not None
