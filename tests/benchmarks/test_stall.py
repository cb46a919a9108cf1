"""benchmarks/stall.py over a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"


def test_it_measures_the_gaps_around_a_long_prompt(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/stall.py"), "--requests", "2"),
            *("--prompt-tokens", "24", "--token-budget", "8", "--steps", "3", "--rounds", "2"),
            f"model={FIXTURES / 'reference/llama'}",
            f"processor.tokenizer.tokenizer_file={FIXTURES / 'frozen/artifacts/a16w4'}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "2 requests are answered, a prompt of 24 tokens arrives" in done.stdout
    rows = re.findall(r"\| (before it arrives|while it is read) \| (.+) \| (.+) \|", done.stdout)
    assert [name for name, *_ in rows] == ["before it arrives", "while it is read"]
    assert all(0 < float(median) <= float(longest) for _, median, longest in rows)
    # Of a step's 8 tokens 2 are of the others.
    assert re.search(r"first token comes after \d+\.\d+ s, in 4 steps", done.stdout)
