"""benchmarks/prefix.py over a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"


def test_it_compares_with_the_cache_and_without(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/prefix.py"), "--prompts", "5"),
            *("--prefix", "40", "--own", "3", "--slots", "2", "--rounds", "1"),
            f"model={FIXTURES / 'reference/llama'}",
            f"processor.tokenizer.tokenizer_file={FIXTURES / 'frozen/artifacts/a16w4'}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "5 prompts of one prefix of 40 tokens and 3 of their own" in done.stdout
    assert "First tokens: equal." in done.stdout
    cached = re.search(r"\((\d+) tokens were cached\)", done.stdout)
    assert cached and int(cached[1]) == 4 * 40
