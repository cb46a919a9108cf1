from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT

FIXTURES = ROOT / "tests/fixtures"


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., str]:
    """What a benchmark prints of a tiny model."""

    def run(script: str, *arguments: str) -> str:
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "benchmarks" / script), *arguments),
                f"model={FIXTURES / 'reference/llama'}",
                f"processor.tokenizer.tokenizer_file={FIXTURES / 'frozen/artifacts/a16w4'}",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
