from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import FIXTURES, ROOT
from tests.tokenizer_files import write_ascii_tokenizer


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., str]:
    """The output of a benchmark for a tiny model."""

    write_ascii_tokenizer(tmp_path)

    def run(script: str, *arguments: str) -> str:
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "benchmarks" / script), *arguments),
                f"model={FIXTURES / 'reference/llama'}",
                f"processor.tokenizer.tokenizer_file={tmp_path}",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
