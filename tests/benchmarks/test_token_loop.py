"""benchmarks/token_loop.py over few and small logits."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

SCRIPT = ROOT / "benchmarks/token_loop.py"


def test_every_size_and_way_has_a_figure() -> None:
    sizes = ["--vocabularies", "64", "--batches", "1", "3", "--new-tokens", "4", "--rounds", "1"]
    done = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    ways = [(batch, way) for batch in ("1", "3") for way in ("greedy", "sampling")]
    assert [tuple(row[1:3]) for row in rows] == ways
    assert all(row[0] == "64" and float(row[3]) > 0 for row in rows)
