"""Fixtures that tests of several packages share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Derandomized: a run of the tests says the same today and tomorrow. No deadline: machines differ.
settings.register_profile("local", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "local")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """`cli("model=tiny_llama", ...)` runs run_lite.py in a process of its own, in tmp_path.

    Keywords: `stdin` (text), `cwd`, `env` (changes; None removes a name), `timeout` in seconds.
    """

    def run(
        *arguments: str,
        stdin: str = "",
        cwd: Path = tmp_path,
        env: dict[str, str | None] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        changes = env or {}
        environment = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
        for name in (name for name, value in changes.items() if value is None):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, str(ROOT / "run_lite.py"), *arguments],
            input=stdin,
            cwd=cwd,
            env=environment,
            timeout=timeout,
            capture_output=True,
            encoding="utf-8",
        )

    return run


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M as a GGUF of 98 MB, from the cache; downloaded once where it is not there."""
    from lite_runner.weights.source import cache_dir, fetch

    model = yaml.safe_load((ROOT / "conf/model/smollm2_135m.yaml").read_text(encoding="utf-8"))
    uri = model["model"]["model_config"]["checkpoint_name_or_path"]
    cache_dir().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir() / ".tests.lock"):  # the other test process waits, then finds it
        return Path(fetch(uri, report=print))
