"""benchmarks/serve.py against a server of a tiny model, and others that do not start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf

PAGE = """# A page

Before.

<!-- made by benchmarks/serve.py -->
old
<!-- to here -->

After.
"""


def test_tables_and_a_chart_of_servers(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "page.md").write_text(PAGE)
    ours = f"{sys.executable} {ROOT}/run_lite.py run_mode=serve model={{gguf}} serve.port={{port}}"
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks/serve.py", "--gguf", "tiny.gguf"),
            *("--server", f"ours={ours}"),
            *("--server", f"ours={ours} adapter_path={{adapters}}"),
            *("--server", f"broken={sys.executable} -c \"raise SystemExit('no such thing')\""),
            *("--server", "missing=no-such-program {ggufs}"),
            *("--rates", "4", "9", "--seconds", "1", "--prompt", "20", "--new", "5"),
            *("--adapters", "0", "2", "--prefixes", "own", "shared"),
            *("--json", "all.json", "--page", "page.md", "--chart", "chart.png"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "without broken: no such thing" in done.stderr
    assert "without missing: " in done.stderr
    cells = json.loads((tmp_path / "all.json").read_text())
    cases = [(cell["adapters"], cell["prefix"], cell["rate"]) for cell in cells]
    assert cases == [(n, prefix, r) for n in (0, 2) for prefix in ("own", "shared") for r in (4, 9)]
    for cell in cells:
        assert cell["server"] == "ours" and cell["tokens_s"] > 0 and cell["failed"] == 0
        for times in (cell["first_ms"], cell["token_ms"]):
            assert times == sorted(times) and len(times) == 3
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# A page\n\nBefore.\n") and text.endswith("\nAfter.\n")
    assert "(chart.svg)" in text and "old" not in text and text.count("| ours |") == len(cells)
    assert "with 2 adapters, half of each prompt the same:" in text
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "with 2 adapters" in (tmp_path / "chart.svg").read_text()


def test_terminated_it_ends_its_servers(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    forever = f"sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600'"
    command = [sys.executable, ROOT / "benchmarks/serve.py", "--gguf", "none.gguf"]
    with subprocess.Popen([*command, "--server", f"slow={forever}"]) as process:
        while not pid.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
