"""The cache folder of a user, and small values in it that take longer to make than to read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.system.files import atomic_write
from lite_runner.system.json_file import read_json_object

VALUES = "values"  # folder below cache_dir()


def cache_dir() -> Path:
    """The cache folder of downloads and derived files; may not exist yet."""
    chosen = os.environ.get("LITE_RUNNER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "lite_runner"


def remembered(name: str, state: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, of JSON's types; from the cache where it was made of this `state`.

    There is one value of a name, the newest. Where there is no cache yet, or it cannot be written,
    it is made each time.
    """
    cache = cache_dir()
    if not cache.is_dir():
        return make()
    path = cache / VALUES / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(ArtifactError):  # not there, or broken
        found = read_json_object(path)
        if found.get("name") == name and found.get("state") == state and "value" in found:
            return found["value"]
    value = make()
    text = json.dumps({"name": name, "state": state, "value": value})
    with contextlib.suppress(EnvironmentFault), atomic_write(path) as file:
        file.write(text.encode())
    return value
