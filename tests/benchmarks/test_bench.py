"""benchmarks/bench.py over engines that only print measurements."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FIGURES: dict[str, Any] = {
    "decode_tok_s": 60.0,
    "prefill_tok_s": 1200.0,
    "first_token_s": 1.5,
    "load_s": 0.9,
    "peak_rss_mib": 1800.0,
    "disk_mib": 516.5,
}


def bench(
    folder: Path, *engines: dict[str, Any], others: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """One round of engines that print these lines, and of other commands; the first is ours."""
    options = [f"--peer={command}" for command in others]
    for index, engine in enumerate(engines):
        file = folder / f"{index} .json"
        file.write_text("a line before\n" + json.dumps(engine) + "\n")
        options += ["--peer" if index else "--ours", f"cat {shlex.quote(str(file))}"]
    command = [sys.executable, str(ROOT / "benchmarks/bench.py"), *options]
    sizes = ["--batches", "2", "--rounds", "1"]
    return subprocess.run([*command, *sizes], capture_output=True, text=True)


def test_each_engine_has_a_row_and_ratios(tmp_path: Path) -> None:
    done = bench(
        tmp_path,
        {"engine": "ours", "token_ids": [[1, 2], [3, 4]], **FIGURES},
        {"engine": "half", "token_ids": [[1, 2], [3, 4]], **FIGURES, "decode_tok_s": 30.0},
        {"engine": "small", "token_ids": [[1, 2], [3, 5]], **FIGURES, "disk_mib": 103.3},
    )
    assert done.returncode == 0, done.stderr
    head, rule, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, rule, *rows)]
    assert {len(row) for row in cells} == {8}
    assert cells[0][-2:] == ["peak memory, MiB", "on disk, MiB"]
    assert cells[2] == ["2", "ours", "60.0", "1200", "1.50", "0.90", "1800", "516"]
    assert cells[3][1:4] == ["half", "30.0 (2.00)", "1200 (1.00)"]
    assert cells[4][-1] == "103.3 (5.00)"
    assert "half at batch 2: equal; small at batch 2: differ first in row 1 at token 1" in (
        done.stdout
    )
    ceiling = re.search(r"These threads read memory at (\d+\.\d) GB/s\.", done.stdout)
    assert ceiling and float(ceiling[1]) > 0


def test_a_peer_that_fails_is_left_out_and_named(tmp_path: Path) -> None:
    dies = shlex.join([sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"])
    done = bench(
        tmp_path,
        {"engine": "ours", "token_ids": [[1]], **FIGURES},
        {"engine": "peer", "token_ids": [[1]], **FIGURES},
        others=["cat nothing-here", dies],
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 2")]
    assert [row.split("|")[2].strip() for row in rows] == ["ours", "peer"]
    assert "Left out: cat nothing-here ended with exit code 1." in done.stdout
    assert f"Left out: {dies} ended by SIGILL." in done.stdout
    assert "nothing-here: No such file" in done.stderr


def test_ours_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    done = bench(tmp_path, {"engine": "ours", "token_ids": [[1]], **FIGURES}, others=["false"])
    assert done.returncode == 0, done.stderr
    assert "Left out: false ended with exit code 1." in done.stdout
    assert "Generated ids" not in done.stdout


def test_ours_that_fails_ends_it(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/bench.py"
    done = subprocess.run(
        [sys.executable, str(script), "--ours", "cat nothing-here", "--peer", "true"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "cat nothing-here ended with exit code 1" in done.stderr
