"""The key of a server: in the environment or in a file, never in a config."""

from __future__ import annotations

import os
from pathlib import Path

from lite_runner.errors import ConfigError

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
